"""The metrics of PromQL expressions and of metrics pages."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_LABEL_LISTS = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)"


def with_variables(expr: str) -> str:
    """Return the expression with its variables at values that match everything."""
    return expr.replace("$__rate_interval", "1m").replace("$job", ".*")


def metrics_in(expr: str) -> set[str]:
    """Return the names of all metrics of an expression."""
    bare = re.sub(r'"(\\.|[^"\\])*"', "", expr)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(_LABEL_LISTS, "", bare)
    names = re.finditer(r"[A-Za-z_:][A-Za-z0-9_:]*(?!\s*\(|[A-Za-z0-9_:])", bare)
    return {name[0] for name in names} - _WORDS


def series_in(page: str) -> set[str]:
    """Return the names of the series that a metrics page has, or will have once they count."""
    suffixes = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_sum", "_count"),
        "info": ("_info",),
    }
    return {
        family.name + suffix
        for family in text_string_to_metric_families(page)
        for suffix in suffixes.get(family.type, ("",))
    }
