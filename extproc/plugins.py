"""Finds a rule by name: built in, installed as an entry point, or `module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from extproc.core.policies import BUILT_IN, Policy

GROUP = "extproc.policies"
"""Entry point group in which packages offer rules."""


class PolicyError(Exception):
    """The rule cannot be had; the message says why and what is allowed."""


def load_policy(name: str, args: Mapping[str, Any]) -> Policy:
    """Make the rule called `name` with `args` as its keyword arguments.

    Raises:
        PolicyError: Unknown, not importable, its arguments refused, or not a rule.
    """
    factory = _find(name)
    try:
        policy = factory(**args)
    except Exception as error:  # whatever a user's rule raises about its arguments
        raise PolicyError(f"policy {name}: {str(error) or type(error).__name__}") from error
    if not callable(getattr(policy, "choose", None)):
        raise PolicyError(f"policy {name}: has no method choose(snapshot, request, *, rng)")
    return policy  # type: ignore[no-any-return] # checked to be a rule one line above


def _find(name: str) -> Any:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return _import(name, name)
    for entry_point in entry_points(group=GROUP, name=name):
        return _import(name, entry_point.value)
    allowed = ", ".join(sorted(BUILT_IN))
    raise PolicyError(
        f"policy {name}: unknown; allowed: {allowed}, an entry point in {GROUP}, module:attribute"
    )


def _import(name: str, reference: str) -> Any:
    module_name, _, attribute = reference.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a user's module raises when it is imported
        raise PolicyError(f"policy {name}: cannot be imported: {error}") from error
    return found
