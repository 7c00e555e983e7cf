"""What a policy of a user may name: it is exported, on its page, and all that our examples use."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import extproc
from extproc.routing.policies import Founding, PolicyOptions
from tests.pages import blocks, pages, relative

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "policy-api.md"
EXPORTED = {name: getattr(extproc, name) for name in extproc.__all__ if name != "__version__"}
KINDS = {name: each for name, each in EXPORTED.items() if isinstance(each, type)}


def public(kind: type) -> set[str]:
    """The attributes and methods that a policy may use, also those that a constructor sets."""
    made = Founding() if kind is Founding else kind
    return {name for name in dir(made) if not name.startswith("_")}


# --- types ------------------------------------------------------------------------------------


def public_types(kind: type) -> Iterator[str]:
    """The types of public attributes, and of what public methods and the constructor take and
    return."""
    written = vars(kind).get("__annotations__", {})
    yield from (each for name, each in written.items() if not name.startswith("_"))
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        is_public = not name.startswith("_") or (name == "__init__" and kind is Founding)
        if is_public and inspect.isfunction(function):
            yield from function.__annotations__.values()


def of_the_project(kind: type, annotation: str) -> Iterator[tuple[str, object]]:
    """The names in an annotation that mean something of this project, with what they mean."""
    known = vars(sys.modules[kind.__module__])
    for node in ast.walk(ast.parse(annotation)):
        if isinstance(node, ast.Name) and node.id in known:
            value = known[node.id]
            is_foreign = inspect.ismodule(value) or (
                isinstance(value, type) and not value.__module__.startswith("extproc")
            )
            if not is_foreign and getattr(value, "__module__", "") != "typing":
                yield node.id, value


@pytest.mark.parametrize("name", KINDS)
def test_the_types_of_what_is_public_are_exported(name: str) -> None:
    kind = KINDS[name]
    found = [each for written in public_types(kind) for each in of_the_project(kind, written)]

    assert [each for each, value in found if EXPORTED.get(each) is not value] == []


def test_types_of_the_project_are_found_in_annotations() -> None:
    view = KINDS["EndpointView"]

    assert dict(of_the_project(view, "Mapping[str, Costs] | None")).keys() == {"Costs"}
    assert dict(of_the_project(view, "tuple[Rejection, Terms]")).keys() == {"Rejection", "Terms"}


# --- the page ---------------------------------------------------------------------------------


def sections() -> dict[str, str]:
    """The sections of the page by their heading."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed(section: str) -> list[str]:
    """The names in the first column of its tables."""
    return re.findall(r"^\| `(\w+)(?:\(.*?\))?` \|", section, flags=re.M)


def test_the_page_has_a_section_for_each_exported_name() -> None:
    assert sections().keys() - {"What is promised", "A policy"} == EXPORTED.keys() - {"Policy"}


@pytest.mark.parametrize("name", sorted(KINDS.keys() - {"Policy"}))
def test_the_page_lists_exactly_the_public_names(name: str) -> None:
    found = listed(sections()[name])

    assert sorted(found) == sorted(public(KINDS[name]))


def test_the_page_lists_what_the_router_asks_a_policy_for() -> None:
    section = sections()["A policy"]

    assert {*re.findall(r"^def (\w+)\(", section, flags=re.M)} == public(KINDS["Policy"])
    assert set(listed(section)) == public(PolicyOptions)
    assert {name for name in asked_for() if not name.startswith("_")} == {
        *public(PolicyOptions),
        *public(KINDS["Policy"]),
    }


def asked_for() -> Iterator[str]:
    """The attributes of a policy that production looks for by name."""
    rooms = ("routing", "service", "observe", "queue", "request")
    files = [path for room in rooms for path in (ROOT / "extproc" / room).rglob("*.py")]
    for path in (*files, ROOT / "extproc" / "plugins.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name("getattr"), args=[of, ast.Constant(str(name)), *_]):
                    if ast.unparse(of).rpartition(".")[2] == "policy":
                        yield name


# --- examples ---------------------------------------------------------------------------------


def python_on(page: Path) -> str:
    """The blocks of Python of a page."""
    return "\n".join(blocks(page.read_text(encoding="utf-8"), "python"))


def unstable(source: str) -> Iterator[str]:
    """Names of ours in a program that nobody promises, and attributes that our values lack."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (each.name for each in names if each.name.startswith("extproc"))
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("extproc"):
                imported = [(module, each.name) for each in names]
                yield from (
                    ".".join(each)
                    for each in imported
                    if each[0] != "extproc" or each[1] not in EXPORTED
                )
            case ast.Attribute(value=ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name.startswith("_") and not name.endswith("__"):
                yield name
            case ast.Call(keywords=given):
                yield from (each.arg for each in given if each.arg and each.arg.startswith("_"))
            case ast.FunctionDef():
                yield from lacking(node)


def lacking(function: ast.FunctionDef) -> Iterator[str]:
    """Attributes of its arguments that their types do not have, of those that are ours."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    kinds = {each.arg: KINDS.get(ast.unparse(each.annotation or each)) for each in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind: Any = kinds.get(node.value.id)
            if kind is not None and node.attr not in public(kind):
                yield f"{kind.__name__}.{node.attr}"


EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
SHOWN = [page for page in pages() if "extproc" in python_on(page)]


@pytest.mark.parametrize("path", EXAMPLES, ids=relative)
def test_an_example_uses_stable_names_only(path: Path) -> None:
    assert list(unstable(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", SHOWN, ids=relative)
def test_python_on_a_page_uses_stable_names_only(page: Path) -> None:
    assert list(unstable(python_on(page))) == []


def test_the_tutorial_and_the_readme_are_among_them() -> None:
    assert {ROOT / "README.md", ROOT / "docs" / "first-policy.md"} <= set(SHOWN)
    assert ROOT / "examples" / "policy" / "tenants.py" in EXAMPLES


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import extproc.types", "extproc.types"),
        ("from extproc.types import Pick", "extproc.types.Pick"),
        ("from extproc import rejections", "extproc.rejections"),
        ("print(pod._made)", "_made"),
        ("EndpointView('a', _made=True)", "_made"),
        ("def choose(self, request: RequestInfo): return request.prompt", "RequestInfo.prompt"),
    ],
)
def test_a_name_that_nobody_promises_is_found(source: str, name: str) -> None:
    assert list(unstable(source)) == [name]
