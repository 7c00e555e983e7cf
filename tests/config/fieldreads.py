"""Which fields of the configuration's sections the package reads, found without running it.

The types of names are followed as far as the package writes them: annotations, assignments, loops
and fields that are sections. What a section's own checks read is no use of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from extproc.config import Config, configured
from extproc.config.base import Section, section_in

PACKAGE = Path(configured.__file__).parents[1]
Kinds = tuple[type[Section], ...]
_ELEMENTS = "values", "items", "get", "over"
"""Methods that return what their collection, or their section, has."""


def fields_read(kinds: Mapping[str, type[Section]], *sources: str) -> set[tuple[str, str]]:
    """Return fields, each with the name of its section, that sources read."""
    found: set[tuple[str, str]] = set()
    for source in sources:
        reads = _Reads(kinds)
        reads.visit(ast.parse(source))
        found |= reads.found
    return found


def package_sources() -> Iterator[str]:
    """Yield the sources that may know of a configuration."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "onfig" in text and path.parent.name != "gen":
            yield text


class _Reads(ast.NodeVisitor):
    def __init__(self, kinds: Mapping[str, type[Section]]) -> None:
        self.found: set[tuple[str, str]] = set()
        self._kinds, self._known = kinds, dict[str, Kinds]()
        self._own: Kinds = ()

    def _of(self, node: ast.AST | None) -> Kinds:
        """The sections that an expression may be."""
        match node:
            case ast.Name():
                return self._known.get(node.id, ())
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if not self._own:
                return self._known.get(f"self.{name}", (Config,) if name == "_config" else ())
            case ast.Attribute():
                owners = [kind for kind in self._of(node.value) if node.attr in kind.model_fields]
                inner = [section_in(kind.model_fields[node.attr].annotation) for kind in owners]
                return tuple(kind for kind in inner if kind is not None)
            case ast.Call(func=ast.Attribute() as called) if called.attr in _ELEMENTS:
                return self._of(called.value)
            case ast.Call(func=ast.Name() as called):
                return self._of(called)
            case ast.Subscript() | ast.NamedExpr():
                return self._of(node.value)
            case ast.DictComp():
                self._comprehend(node)
                return self._of(node.value)
            case ast.IfExp():
                return self._of(node.body) + self._of(node.orelse)
            case ast.BoolOp():
                return tuple(kind for each in node.values for kind in self._of(each))
        return ()

    def _named(self, annotation: ast.AST | None) -> Kinds:
        names = [] if annotation is None else [*ast.walk(annotation)]
        return tuple(
            self._kinds[each.id]
            for each in names
            if isinstance(each, ast.Name) and each.id in self._kinds
        )

    def _bind(self, target: ast.AST, kinds: Kinds) -> None:
        for each in ast.walk(target) if kinds else ():
            if isinstance(each, ast.Name):
                self._known[each.id] = kinds
            elif isinstance(each, ast.Attribute):
                self._known[f"self.{each.attr}"] = kinds

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._own = self._named(ast.Name(node.name))
        self.generic_visit(node)
        self._own = ()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._bind(ast.Name(node.name), self._named(node.returns))
        before, self._known = self._known, dict(self._known)
        if self._own and not node.decorator_list:
            self._known["self"] = self._own
        for each in (*node.args.args, *node.args.kwonlyargs):
            if each.arg != "self":
                self._known[each.arg] = self._named(each.annotation)
        self.generic_visit(node)
        kept = {name: kinds for name, kinds in self._known.items() if name.startswith("self.")}
        self._known = before | kept

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = [*zip(target.elts, node.value.elts, strict=False)]
            for each, value in pairs:
                self._bind(each, self._of(value))
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._bind(node.target, self._of(node.value))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, self._of(node.iter))
        self.generic_visit(node)

    def _comprehend(self, node: Any) -> None:
        for each in node.generators:
            self._bind(each.target, self._of(each.iter))
        self.generic_visit(node)

    visit_ListComp = visit_DictComp = visit_SetComp = visit_GeneratorExp = _comprehend

    def visit_Attribute(self, node: ast.Attribute) -> None:
        kinds = self._of(node.value)
        self.found |= {(each.__name__, node.attr) for each in kinds}
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Settings are filled by the names of fields, and so is what gets all of a section."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("_settings", "dict") and node.args:
            made, *rest = node.args
            settings = getattr(configured, made.id, None) if isinstance(made, ast.Name) else None
            names = getattr(settings, "__struct_fields__", None)
            for kind in (kind for each in (made, *rest) for kind in self._of(each)):
                every = kind.model_fields if node.func.id == "dict" else names or ()
                self.found |= {(kind.__name__, name) for name in every}
