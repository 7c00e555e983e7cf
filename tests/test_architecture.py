"""The rooms and the arrows between them, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "extproc"

CORE_LIBRARY = {
    *("__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum"),
    *(
        "functools",
        "hashlib",
        "heapq",
        "http",
        "itertools",
        "json",
        "math",
        "operator",
        "random",
        "re",
    ),
    *("struct", "types", "typing", "urllib.parse", "msgspec", "ipaddress"),
}
"""Nothing here reads a clock, does I/O, logs, or waits. `hashlib` gives what clients choose a fixed
length before it is remembered; `random` is there for its type: ruff bans
its functions."""

SHELL_SHARED = {
    "extproc.shell.rpc",
    "extproc.shell.dynamicmetadata",
    "extproc.shell.loops",
    "extproc.shell.gen",
    "extproc.shell.files",
    "extproc.shell.yamltext",
    "extproc.shell.httpserver",
    "extproc.shell.turns",
}
"""What several shell files share: the transport's contract, the names of what passes in Envoy's
metadata, the loops over endpoints, messages, bounded reading of files and of YAML, the HTTP
listener, work in turns."""
SHELL_PAIRS = {
    ("extproc.shell.server", "extproc.shell.codec"),
    ("extproc.shell.codec", "extproc.shell.cutbody"),
    ("extproc.shell.wire", "extproc.shell.tlsbytes"),
    ("extproc.shell.loops", "extproc.shell.podhttp"),
}
"""One thing of the outside, in two files."""

KNOWS_CONFIG = {
    f"extproc.{name}"
    for name in (
        *("app", "cli", "configdocs", "configfile", "epp", "kubewiring", "peering", "settings"),
        *("sideports", "startup"),
    )
}
WIRES = {
    "extproc.app",
    "extproc.cli",
    "extproc.configfile",
    "extproc.startup",
    "extproc.dispatch",
    "extproc.settings",
    "extproc.transports",
    "extproc.gauges",
    "extproc.dnswiring",
    "extproc.kubewiring",
    "extproc.livefeed",
    "extproc.peering",
    "extproc.epp",
    "extproc.sideports",
    "extproc.traced",
}
"""Parts of the composition root, and the commands."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees() -> dict[str, ast.Module]:
    """Every module that is written by hand, by name."""
    return {
        name_of(path): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "gen" not in path.parts
    }


def imports(tree: ast.AST) -> set[str]:
    """Modules that are imported anywhere; of ours also the ones behind `from package import`."""
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


def wrong(room: str, is_allowed: Callable[[str, str], bool]) -> Iterator[str]:
    """Imports of a room's modules that are not allowed, as `importer -> imported`."""
    for module, tree in trees().items():
        if is_in(module, room):
            for imported in sorted(imports(tree)):
                if not is_allowed(module, imported):
                    yield f"{module} -> {imported}"


def test_core_imports_itself_and_a_short_list() -> None:
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


def test_what_chooses_sees_snapshots_and_never_the_pool() -> None:
    for room in ("extproc.core.picker", "extproc.core.admission", "extproc.core.policies"):
        assert list(wrong(room, lambda _, imported: imported != "extproc.core.pool")) == []


def test_shell_files_do_not_know_each_other() -> None:
    def is_allowed(module: str, imported: str) -> bool:
        if (module, imported) in SHELL_PAIRS:
            return True
        return not is_in(imported, "extproc") or is_in(imported, "extproc.core", *SHELL_SHARED)

    assert list(wrong("extproc.shell", is_allowed)) == []


def test_the_simulator_is_a_client_of_core_alone() -> None:
    def is_allowed(_: str, imported: str) -> bool:
        return not is_in(imported, "extproc") or is_in(imported, "extproc.core", "extproc.sim")

    assert list(wrong("extproc.sim", is_allowed)) == []


@pytest.mark.parametrize(
    ("room", "importers"),
    [
        ("extproc.app", {"extproc.cli", "extproc.epp"}),
        ("extproc.cli", {"extproc.__main__"}),
        ("extproc.config", {*KNOWS_CONFIG, "extproc.transports"}),
        ("extproc.shell", WIRES),
        ("extproc.demo", {"extproc.cli", "extproc.loadtest"}),
        (
            "extproc.sim",
            {"extproc.lab", "extproc.labcache", "extproc.calibration", "extproc.loadtest"},
        ),
        ("extproc.lab", {"extproc.cli", "extproc.loadtest"}),
        ("extproc.loadtest", {"extproc.cli"}),
    ],
)
def test_only_these_import_a_room(room: str, importers: set[str]) -> None:
    found = {
        module
        for module, tree in trees().items()
        if not is_in(module, room) and any(is_in(name, room) for name in imports(tree))
    }

    assert [module for module in sorted(found) if not is_in(module, *importers)] == []


def test_load_tests_know_a_gateway_by_its_ports_alone() -> None:
    """What they start they start as processes: what they measure is what users run."""

    def is_allowed(_: str, imported: str) -> bool:
        return not is_in(imported, "extproc.app", "extproc.config", "extproc.shell")

    assert list(wrong("extproc.loadtest", is_allowed)) == []


def test_only_the_codec_and_the_services_know_protobuf_messages() -> None:
    """Transports carry bytes."""

    def is_allowed(_: str, imported: str) -> bool:
        return not is_in(imported, "envoy", "google", "extproc.shell.gen")

    for transport in ("extproc.shell.grpcio", "extproc.shell.wire", "extproc.shell.rpc"):
        assert list(wrong(transport, is_allowed)) == []
