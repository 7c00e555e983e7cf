"""Policies by name: built in, installed as an entry point, or `module:attribute`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from inspect import Parameter, iscoroutine, signature
from random import Random
from traceback import extract_tb
from typing import Any

from extproc.errors import FOREIGN_ERRORS
from extproc.routing.policies import BUILT_IN, Policy
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

GROUP = "extproc.policies"
"""Entry point group of policies in other packages."""


class PolicyError(Exception):
    """The policy cannot be loaded; the message says why and what is allowed."""


def load_policy(name: str, args: Mapping[str, Any]) -> Policy:
    """Make the policy `name` with `args` as its keyword arguments.

    Raises:
        PolicyError: It is unknown, cannot be imported, refuses its arguments, is not a policy, or
            fails to choose between two made-up endpoints.
    """
    factory = _find(name)
    try:
        # Another one for the trial, which may leave something behind.
        policy, tried = factory(**args), factory(**args)
    except FOREIGN_ERRORS as error:  # whatever a user's policy raises for its arguments
        unknown = _unknown(factory, args) if isinstance(error, TypeError) else ""
        raise PolicyError(f"policy {name}: {unknown or _said(error)}") from error
    if not callable(getattr(policy, "choose", None)):
        raise PolicyError(f"policy {name}: has no method choose(snapshot, request, *, rng)")
    ttft_s: object = getattr(policy, "ttft_s", None)
    if ttft_s is not None and not (isinstance(ttft_s, int | float) and ttft_s > 0):
        raise PolicyError(f"policy {name}: ttft_s is {ttft_s!r}; allowed: seconds above 0, or None")
    if name not in BUILT_IN:
        _try(tried, name)
    return policy  # type: ignore[no-any-return] # checked above


def describe_error(error: BaseException) -> str:
    """Return an error on one line: its type, its text, and the place that raised it."""
    frames = extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(_text(error).split())}{place}"


def _said(error: BaseException) -> str:
    """Return an error's text, and its type where the text alone tells little."""
    text = _text(error)
    if text and isinstance(error, Exception):
        return text
    return f"{type(error).__name__} {text}".strip()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except FOREIGN_ERRORS:  # its text is somebody's code, too
        return ""


def _try(policy: Any, name: str) -> None:
    """Have a policy choose between two made-up endpoints: for an adapter, and for the base model.

    Raises:
        PolicyError: It raises, is asynchronous, or returns neither a Choice of these nor a Wait.
    """
    models = frozenset({"base", "adapter"})
    views = tuple(EndpointView(f"192.0.2.{n}:8000", registered=models) for n in (1, 2))
    snapshot = Snapshot(views)
    for request in (RequestInfo("adapter", adapter="adapter", body_bytes=300), RequestInfo("base")):
        try:
            choice: object = policy.choose(snapshot, request, rng=Random(0))
        except FOREIGN_ERRORS as error:  # whatever a user's policy raises
            raise PolicyError(f"policy {name}: choose raised {describe_error(error)}") from error
        if iscoroutine(choice):
            choice.close()
            raise PolicyError(f"policy {name}: choose is asynchronous; it has to be a plain method")
        if isinstance(choice, Wait):
            continue
        if not isinstance(choice, Choice):
            raise PolicyError(
                f"policy {name}: choose returned {type(choice).__name__}; allowed: Choice, Wait"
            )
        if not choice.endpoints or not all(each in views for each in choice.endpoints):
            raise PolicyError(f"policy {name}: choose returned no endpoints of its snapshot")


def _unknown(factory: Any, args: Mapping[str, Any]) -> str:
    """Return which arguments a policy does not take, and which it does; empty if there are none."""
    try:
        # Not of what it wraps: a decorator may take arguments of its own.
        parameters = signature(factory, follow_wrapped=False).parameters
    except (TypeError, ValueError, NameError):
        # Not callable, written in C, or annotated with names for type checkers (Python 3.14).
        return ""
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return ""
    wrong = ", ".join(sorted(args.keys() - parameters.keys()))
    return f"args: {wrong}: unknown; allowed: {', '.join(parameters) or 'none'}" if wrong else ""


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
    except FOREIGN_ERRORS as error:  # whatever a user's module raises on import
        is_missing = isinstance(error, ModuleNotFoundError)
        cure = "; install it, or name its folder in PYTHONPATH" if is_missing else ""
        raise PolicyError(f"policy {name}: cannot be imported: {_said(error)}{cure}") from error
    return found
