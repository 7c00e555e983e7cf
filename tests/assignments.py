"""Where attributes of other objects are set, read from the sources."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def assigned(tree: ast.AST) -> list[str]:
    """Return each attribute that a module sets outside of its class, as source, with its line.

    Not one of `self` or `cls`; of an object that the same function has just made; or that a class
    of the same module has.
    """
    found = list[str]()
    _collect(tree, attributes(tree), frozenset(), found)
    return found


def attributes(tree: ast.AST, name: str = "") -> set[str]:
    """Return the attributes of the classes of a module, or of the class with a name."""
    return {
        attribute
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and name in ("", node.name)
        for attribute in _attributes(node)
    }


def _attributes(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        yield from (each.attr for each in _targets(node) if _is_own(each.value))


def _collect(node: ast.AST, allowed: set[str], made: frozenset[str], found: list[str]) -> None:
    if isinstance(node, FUNCTIONS):
        made |= frozenset(_made(node))
    for target in _targets(node):
        is_made = isinstance(target.value, ast.Name) and target.value.id in made
        if not (_is_own(target.value) or is_made or target.attr in allowed):
            found.append(f"{ast.unparse(target)} in line {target.lineno}")
    for child in ast.iter_child_nodes(node):
        _collect(child, allowed, made, found)


def _targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a node sets or deletes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node
    elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
        name = node.args[1]
        attribute = name.value if isinstance(name, ast.Constant) else ast.unparse(name)
        yield ast.copy_location(ast.Attribute(node.args[0], str(attribute), ast.Store()), node)


def _made(function: ast.AST) -> set[str]:
    """Return the names that a function gives to what it makes by a class, and to nothing else."""
    made: Counter[str] = Counter()
    bound: Counter[str] = Counter()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] += 1
        elif isinstance(node, ast.arg):
            bound[node.arg] += 1
        if isinstance(node, ast.Assign) and _is_new(node.value):
            made.update(each.id for each in node.targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and _is_new(node.value):
            made[ast.unparse(node.target)] += 1
    return {name for name, count in made.items() if count == bound[name]}


def _is_new(value: ast.AST | None) -> bool:
    """Return whether an expression calls a class, by its name: `Class(...)`."""
    made = value.func if isinstance(value, ast.Call) else None
    if isinstance(made, ast.Subscript):
        made = made.value
    name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
    return bool(name.lstrip("_")[:1].isupper())


def _is_own(value: ast.AST) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
