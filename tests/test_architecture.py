"""The rooms and the arrows between them, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "extproc"

CORE_LIBRARY = {
    *("__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum"),
    *(
        "fnmatch",
        "functools",
        "hashlib",
        "heapq",
        "ipaddress",
        "itertools",
        "json",
        "math",
        "msgspec",
    ),
    *("msgspec.structs", "operator", "random", "re", "statistics", "struct", "types", "typing"),
    "urllib.parse",
}
"""Nothing here reads a clock, does I/O, logs, or waits. `hashlib` gives what clients choose a fixed
length before it is remembered; `random` is there for its type: ruff bans its functions."""

ARROWS = {
    "core": (),
    "shell": ("core",),
    "config": ("core", "shell.files", "shell.yamltext"),  # files are read in one way everywhere
    "app": ("core", "shell", "config", "plugins"),
    "plugins": ("core",),
    "envoyconfig": ("core",),
    "stack": ("core", "envoyconfig"),
    "workload": ("core",),
    "sim": ("core", "workload"),
    "loadtest": ("core", "workload", "sim", "stack", "envoyconfig", "plugins"),
    "commands": (
        *("core", "shell", "config", "app", "plugins", "envoyconfig", "stack"),
        *("workload", "sim", "loadtest"),
    ),
    "__main__": ("commands",),
}
"""The rooms that each may import. Policies of users import the package: `__init__`."""

TELL_THE_VERSION = ("app", "commands")
"""The rooms that may import the package too, for its version."""

ARROWS_IN_SIM = {
    "engine": (),
    "calibration": ("engine",),
    "fakepod": ("engine",),
    "fleet": ("engine",),
    "opponents": (),
    "trials": ("engine", "fleet", "opponents"),
}

SHELL_SHARED = (
    *("aside", "files", "gen", "httpserver", "loops", "podclient", "podhttp", "rpc"),
    *("turns", "yamltext"),
    *("stores.content", "stores.medium"),
)
"""Modules that several shell files share: blocking calls, bounded reading of files and of YAML,
messages, the HTTP listener, the loops over endpoints and HTTP to them, the transport's contract,
work in turns; what stores keep, and where."""
SHELL_PAIRS = {
    ("server", "codec"),
    ("codec", "cutbody"),
    ("codec", "encoding"),
    ("peerlink", "peerkeys"),
    ("peerlink", "questions"),
    ("peerlink", "tidings"),
    ("peers", "peerlink"),
    ("peers", "questions"),
    ("peers", "tidings"),
    ("podcheck", "podprobes"),
    ("registration", "tokens"),
    ("telemetry", "counters"),
    ("wire", "tlsbytes"),
}
"""Pairs of files for one outside thing."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module written by hand, by name."""
    return {
        name_of(path): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "gen" not in path.parts
    }


def imports(tree: ast.AST) -> set[str]:
    """Return all imported modules; of ours also those behind `from package import`."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the arrows"
            assert node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in trees()} or {node.module}
    return found


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"extproc.{name}" for name in names)


def wrong(room: str, is_allowed: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield the room's imports that are not allowed, as `importer -> imported`."""
    for module, tree in trees().items():
        if is_in(module, room):
            for imported in sorted(imports(tree)):
                if not is_allowed(module, imported):
                    yield f"{module} -> {imported}"


def outside(room: str, *allowed: str) -> list[str]:
    """Return imports of our modules that leave the room for one that is not allowed."""
    places = ours(room, *allowed)

    def is_allowed(_: str, imported: str) -> bool:
        if imported == "extproc":
            return room in TELL_THE_VERSION
        return not is_in(imported, "extproc") or is_in(imported, *places)

    return list(wrong(f"extproc.{room}", is_allowed))


def test_every_module_is_in_a_room() -> None:
    modules = set(trees()) - {"extproc"}

    assert [module for module in modules if not is_in(module, *ours(*ARROWS))] == []


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_along_its_arrows(room: str) -> None:
    assert outside(room, *ARROWS[room]) == []


@pytest.mark.parametrize("room", ARROWS_IN_SIM)
def test_a_room_of_the_simulator_imports_only_along_its_arrows(room: str) -> None:
    others = (f"sim.{each}" for each in ARROWS_IN_SIM[room])

    assert outside(f"sim.{room}", "core", "workload", *others) == []


def test_imports_have_no_circle() -> None:
    """Imports for type checkers and inside functions included."""
    graph = {module: imports(tree) & set(trees()) for module, tree in trees().items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_core_imports_only_itself_and_a_short_list() -> None:
    def is_allowed(module: str, imported: str) -> bool:
        if imported == "hpack":
            return is_in(module, "extproc.core.wire")
        return imported in CORE_LIBRARY or is_in(imported, "extproc.core")

    assert list(wrong("extproc.core", is_allowed)) == []


def test_core_does_not_wait() -> None:
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = [
        module
        for module, tree in trees().items()
        if is_in(module, "extproc.core") and any(isinstance(n, waits) for n in ast.walk(tree))
    ]

    assert found == []


def test_policies_see_snapshots_and_never_the_pool() -> None:
    for room in ours("core.picker", "core.admission", "core.policies"):
        assert list(wrong(room, lambda _, imported: imported != "extproc.core.pool")) == []


def test_shell_files_do_not_import_each_other() -> None:
    shared = ours(*(f"shell.{name}" for name in SHELL_SHARED))
    pairs = {ours(f"shell.{one}", f"shell.{other}") for one, other in SHELL_PAIRS}

    def is_allowed(module: str, imported: str) -> bool:
        if (module, imported) in pairs:
            return True
        return not is_in(imported, "extproc") or is_in(imported, "extproc.core", *shared)

    assert list(wrong("extproc.shell", is_allowed)) == []


def test_only_the_codec_and_the_services_import_protobuf_messages() -> None:
    """Transports carry bytes."""

    def is_allowed(_: str, imported: str) -> bool:
        return not is_in(imported, "envoy", "google", "extproc.shell.gen")

    for transport in ours("shell.grpcio", "shell.wire", "shell.rpc"):
        assert list(wrong(transport, is_allowed)) == []
