"""A little PromQL: as much as names the metrics of an expression."""

from __future__ import annotations

import re

_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_LABEL_LISTS = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"


def with_variables(expr: str) -> str:
    """As Grafana sends it: variables at values that mean everything."""
    return expr.replace("$__rate_interval", "1m").replace("$job", ".*")


def metrics_in(expr: str) -> set[str]:
    """Names of all metrics of an expression."""
    bare = re.sub(r'"(\\.|[^"\\])*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(_LABEL_LISTS, "", bare)
    names = re.finditer(r"[A-Za-z_:][A-Za-z0-9_:]*(?!\s*\(|[A-Za-z0-9_:])", bare)
    return {name[0] for name in names} - _WORDS
