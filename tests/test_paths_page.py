"""The table of paths in docs/errors.md says what the router does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extproc import __version__
from extproc.paths import DEFAULT_INFERENCE_PATHS, Route, RouteKind, RouteTable
from extproc.types import Rejection

_PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
_TABLE = RouteTable()
_SERVED = {
    "served by a pod that has the `model` of the JSON body": RouteKind.INFERENCE_JSON,
    "served by a pod that has the `model` of the form": RouteKind.INFERENCE_FORM,
    "served by the session's pod": RouteKind.STORED_RESPONSE,
    "likewise": RouteKind.STORED_RESPONSE,
    "answered by the router": None,
}
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


def rows() -> list[tuple[list[str], str, str]]:
    section = _PAGE.partition("\n## Paths\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    return [(re.findall(r"`([^`]+)`", paths), methods, what) for paths, methods, what in cells]


def is_served(method: str, path: str) -> bool:
    return isinstance(_TABLE.match(method, path.format(id="resp_1", name="org%2Fa")), Route)


def test_the_inference_paths_are_the_default_ones() -> None:
    listed = [path for paths, _, what in rows() if "`model` of the" in what for path in paths]

    assert sorted(listed) == sorted(DEFAULT_INFERENCE_PATHS)


@pytest.mark.parametrize(("paths", "methods", "what"), rows(), ids=lambda each: str(each)[:40])
def test_each_path_is_served_by_its_methods_alone(
    paths: list[str], methods: str, what: str
) -> None:
    if methods == "any":
        assert what.startswith("not served")
        found = [(path, method) for path in paths for method in METHODS if is_served(method, path)]
        assert found == []
        return
    [kind] = [kind for words, kind in _SERVED.items() if what.startswith(words)]
    for path in paths:
        for method in methods.split(", "):
            route = _TABLE.match(method, path.format(id="resp_1", name="org%2Fa"))
            assert not isinstance(route, Rejection)
            assert kind in (None, route.kind)


def test_no_method_of_a_path_is_left_out() -> None:
    said: dict[str, set[str]] = {}
    for paths, methods, _ in rows():
        for path in paths:
            said.setdefault(path, set()).update(set() if methods == "any" else methods.split(", "))

    assert said == {path: {each for each in METHODS if is_served(each, path)} for path in said}


def test_the_version_is_shown_as_it_is() -> None:
    assert f'{{"version": "{__version__}+extproc"}}' in _PAGE
