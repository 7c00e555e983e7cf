"""The rooms and the arrows between them, read from the sources."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.assignments import assigned, attributes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "extproc"

PURE_LIBRARY = {
    *("__future__", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum"),
    *(
        "fnmatch",
        "functools",
        "hashlib",
        "heapq",
        "hmac",
        "http",
        "io",
        "ipaddress",
        "itertools",
        "json",
    ),
    *("math", "msgspec", "msgspec.structs", "operator", "random", "re", "statistics", "struct"),
    *("types", "typing", "urllib.parse"),
}
"""Nothing here reads a clock, does I/O, logs, or waits. `hashlib` gives what clients choose a fixed
length before it is remembered; `random` is there for its type, and `io` for bytes in memory: ruff
bans their functions."""

WORDS = (
    *("address", "bounds", "costs", "errors", "meters", "openai", "passes", "paths", "phrases"),
    *("protocol", "rejections", "tenancy", "types"),
)
"""At the root of the package: what all rooms talk about, and how."""

ARROWS = {
    "files": (),
    "wire": ("files",),
    "reports": ("files",),
    "learned": (),
    "pods": ("reports", "learned"),
    "envoy": ("pods", "learned", "wire"),
    "queue": ("pods",),
    "adapters": ("pods", "reports", "files", "wire"),
    "routing": ("pods", "learned", "queue", "adapters"),
    "request": ("pods", "learned", "queue", "routing", "wire"),
    "peers": ("pods", "reports", "queue", "adapters", "routing", "observe", "files", "wire", "gen"),
    "discovery": ("reports", "adapters", "routing", "files", "wire"),
    "observe": (
        *("reports", "learned", "pods", "queue", "adapters", "routing", "files", "wire", "gen"),
        "plugins",
    ),
    "config": (
        *("reports", "learned", "pods", "queue", "adapters", "routing", "request", "peers"),
        *("discovery", "files", "wire"),
    ),
    "service": (
        *("reports", "learned", "pods", "queue", "adapters", "routing", "request", "peers"),
        *("discovery", "envoy"),
        *("observe", "config", "plugins", "files", "wire"),
    ),
    "plugins": ("routing",),
    "stack": (),
    "lab": (
        *("reports", "learned", "pods", "queue", "adapters", "routing", "request", "stack"),
        *("envoy", "plugins", "files"),
    ),
    "commands": (
        *("reports", "pods", "adapters", "request", "envoy", "observe", "config", "service"),
        *("plugins", "stack", "lab", "files", "wire"),
    ),
    "__main__": ("commands",),
}
"""The rooms that each may import beside itself and the words. Policies of users import the package:
`__init__`.

Services of several rooms are carried by the `wire`, by its contract `rpc`; long work of any room
takes its turns there, `discovery`'s too. Files that operators name are read, and contexts of TLS
are made, in one way everywhere: `files`. Routers tell each other who waits, so `peers` know the
queue and the router, and what they tell is counted (`observe`). `observe` reads what every room
keeps, down to which pods are slow (`learned`) and how often they are asked (`reports`). Its process
of a policy in shadow loads that as the service does: `plugins`. `config` makes the settings of
every part that has some."""

TELL_THE_VERSION = ("config", "service", "commands")
"""The rooms that may import the package too, for its version."""

ARROWS_IN_LAB = {
    "workload": (),
    "engine": ("workload",),
    "calibration": ("engine", "workload"),
    "fakepod": ("engine",),
    "fleet": ("engine", "workload"),
    "opponents": (),
    "trials": ("engine", "fleet", "opponents", "workload"),
}

IMPURE = {
    "files": ("blocking", "filewatch", "reading", "refusals", "tls", "yamltext"),
    "wire": (
        *("certificates", "httpserver", "listenertls", "memory", "ports", "server", "transports"),
        "yielding",
    ),
    "reports": (
        *("loops", "listings", "patience", "podasks", "podclient", "podhttp", "podsecrets"),
        "scraper",
    ),
    "learned": (),
    "pods": ("scraping",),
    "envoy": ("bootstrap", "completions", "eds", "endings", "health"),
    "queue": (),
    "adapters": (
        *("adaptercalls", "adapterfiles", "adapterstore", "changes", "engineapi", "loading"),
        *("registration", "registrationhttp", "stores", "tokens"),
    ),
    "routing": (),
    "request": ("codec", "encoding", "processor"),
    "peers": (
        *("adapterpeers", "dialler", "peermessages", "keys", "link", "links", "peering", "updates"),
    ),
    "discovery": (
        *("dns", "dnsanswers", "endpointlist", "file", "static"),
        *("kubernetes.api", "kubernetes.apiserver", "kubernetes.declarations"),
        *("kubernetes.inferencepool", "kubernetes.kubewatch", "kubernetes.publisher"),
        *("kubernetes.served", "kubernetes.source", "kubernetes.statuses"),
    ),
    "observe": (
        *("admin", "arms", "counters", "decisionmessages", "decisions", "endpointmetrics"),
        "envoylog",
        "gauges",
        *("interpreter", "latencies", "livefeed", "livepage", "logs", "observers", "pacing"),
        *(
            "recorder",
            "recording",
            "shadow",
            "shadowchild",
            "shadowprocess",
            "sideports",
            "telemetry",
            "tracing",
            "watchclient",
            "watchdog",
        ),
        "watcher",
    ),
}
"""The files of these rooms that touch the outside: event loop, sockets, files, clocks, logs,
protobuf, Prometheus. All others are functions and objects of their arguments."""

STATE = {
    "adapters.book": {"Book": "the planner's memory"},
    "adapters.ledger": {"PodLedger": "pods as the planner knows them"},
    "adapters.podhistory": {"PodHistory": "one of them"},
    "adapters.versions": {"Kept": "what is judged of an adapter"},
    "learned.failurestreaks": {
        "EndpointEnds": "an endpoint's record among others'",
        "FailureStreak": "its failures since it last served anything",
    },
    "pods.foreign": {"ForeignRequests": "an endpoint's requests of other routers"},
    "pods.podhealth": {"PodHealth": "an endpoint's process"},
    "pods.podload": {"PodLoad": "what an endpoint has to do"},
    "pods.podrequests": {"PeerPlace": "some requests of another router"},
    "pods.podrow": {"PodRow": "an endpoint in the columns"},
    "lab.engine.ahead": {"StepsAhead": "steps of the engine that are planned"},
    "lab.engine.records": {"EngineCounters": "what an engine has done"},
    "lab.engine.scheduler": {"Scheduler": "whose groups have changed"},
    "lab.engine.caches": {"Prefix": "blocks that are shared"},
    "lab.engine.sequences": {"Sequence": "a request in the engine"},
    "lab.workload.running": {"LabFlight": "a request of the laboratory"},
    "peers.relay": {"Link": "a connection to a router"},
    "queue.tickets": {"Ticket": "a request that is held, and its end"},
    "wire.lifetime": {"Lifetime": "of a connection"},
    "wire.limits": {"Counters": "of all connections"},
    "wire.outbox": {"Outbox": "of a connection, on the hot path"},
    "wire.grpccall": {"WireStream": "of a call, on the hot path"},
    "wire.streams": {"Streams": "of a connection, on the hot path"},
}
"""Classes whose objects are state that several files of a room work on, and what they hold. None of
their attributes is a callable that is set from outside."""

FOREIGN = {
    "adapters.stores.redis": "redis-py's connections",
    "commands.panels": "typer's options",
    "envoy.eds": "protobuf messages",
    "files.tls": "a TLS context",
    "lab.loadtest.locust.users": "locust's environment and options",
    "observe.logs": "records of logging",
    "peers.peermessages": "protobuf messages",
    "request.encoding": "protobuf messages",
    "wire.headers": "hpack's decoder",
}
"""Files that set attributes of what libraries have made, which have no other way."""


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


@cache
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


def is_pure(module: str) -> bool:
    """Return whether a module of ours may not touch the outside."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else ""
    if room in WORDS:
        return True
    return room in IMPURE and not is_in(module, *ours(*(f"{room}.{n}" for n in IMPURE[room])))


def test_every_module_is_in_a_room() -> None:
    modules = set(trees()) - {"extproc"}

    assert [module for module in modules if not is_in(module, *ours(*ARROWS, *WORDS))] == []


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_along_its_arrows(room: str) -> None:
    assert outside(room, *ARROWS[room], *WORDS) == []


def unused(arrows: Mapping[str, Sequence[str]], *, within: str = "extproc") -> list[str]:
    """Return the arrows along which nothing is imported."""
    found = list[str]()
    for room, others in arrows.items():
        own = (tree for module, tree in trees().items() if is_in(module, f"{within}.{room}"))
        imported = {name for tree in own for name in imports(tree)}
        used = {each for each in others for name in imported if is_in(name, f"{within}.{each}")}
        found += [f"{room} -> {each}" for each in others if each not in used]
    return found


def test_every_arrow_is_used() -> None:
    assert unused(ARROWS) == []
    assert unused(ARROWS_IN_LAB, within="extproc.lab") == []


def test_an_arrow_without_an_import_is_found() -> None:
    assert unused({"wire": ("files", "queue")}) == ["wire -> queue"]


def told_arrows(page: str) -> dict[str, set[str]]:
    """Return the arrows in CONTRIBUTING's table of rooms: `all of these` are the rooms above."""
    found = dict[str, set[str]]()
    for room, cell in re.findall(r"^\| `(\w+)/` \|[^|]*\|([^|]*)\|$", page, re.MULTILINE):
        names = {name for code in re.findall(r"`([^`]+)`", cell) for name in code.split()}
        found[room] = names | set(found if "all of these" in cell else ())
    return found


def test_contributing_tells_the_arrows() -> None:
    """All but those to what is generated, and to the package."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    apart = {"gen", "plugins", "__main__"}
    arrows = {room: set(to) - {"gen"} for room, to in ARROWS.items() if room not in apart}

    assert told_arrows(page) == arrows


def test_an_arrow_that_contributing_does_not_tell_is_found() -> None:
    page = "| `a/` | what? | |\n| `b/` | `A`? | all of these, `c`; `d e` |\n"

    assert told_arrows(page) == {"a": set(), "b": {"a", "c", "d", "e"}}


@pytest.mark.parametrize("word", WORDS)
def test_words_import_words_alone(word: str) -> None:
    assert outside(word, *WORDS) == []


@pytest.mark.parametrize("room", ARROWS_IN_LAB)
def test_a_room_of_the_laboratory_imports_only_along_its_arrows(room: str) -> None:
    others = (f"lab.{each}" for each in ARROWS_IN_LAB[room])

    assert outside(f"lab.{room}", *ARROWS["lab"], *WORDS, *others) == []


def test_imports_have_no_circle() -> None:
    """Imports for type checkers and inside functions included."""
    graph = {module: imports(tree) & set(trees()) for module, tree in trees().items()}

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_pure_files_import_pure_ones_and_a_short_list() -> None:
    def is_allowed(module: str, imported: str) -> bool:
        if not is_pure(module) or imported in PURE_LIBRARY:
            return True
        if imported == "hpack":
            return is_in(module, "extproc.wire")
        return is_in(imported, "extproc") and is_pure(imported)

    assert list(wrong("extproc", is_allowed)) == []


def test_pure_files_do_not_wait() -> None:
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    found = [
        module
        for module, tree in trees().items()
        if is_pure(module) and any(isinstance(n, waits) for n in ast.walk(tree))
    ]

    assert found == []


def test_no_file_is_called_impure_that_is_pure() -> None:
    """A name that is gone, or a file that could be pure."""
    named = ours(*(f"{room}.{name}" for room, names in IMPURE.items() for name in names))

    assert [name for name in named if name not in trees()] == []


sets = cache(assigned)


def attribute_of(found: str) -> str:
    """Return the name of an attribute that `sets` has found."""
    return found.partition(" ")[0].rpartition(".")[2]


def shared(room: str) -> set[str]:
    """Return the attributes that all files of a room may set."""
    return {
        attribute
        for module, classes in STATE.items()
        if is_in(module, room)
        for name in classes
        for attribute in attributes(trees()[f"extproc.{module}"], name)
    }


def test_no_attribute_is_set_outside_of_its_class() -> None:
    """Least of all a callable: a part gets all that it calls when it is made."""
    foreign = ours(*FOREIGN)
    may_set = {room: shared(room) for room in ARROWS}
    found = [
        f"{module}: {each}"
        for module, tree in trees().items()
        if not is_in(module, *foreign)
        for each in sets(tree)
        if attribute_of(each) not in may_set.get("".join(module.split(".")[1:2]), ())
    ]

    assert found == []


def test_no_exception_is_without_need() -> None:
    for module in FOREIGN:
        assert sets(trees()[f"extproc.{module}"]), module
    by_room: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees().items():
        by_room["".join(module.split(".")[1:2])].update(map(attribute_of, sets(tree)))
    for module, classes in STATE.items():
        room = module.partition(".")[0]
        for name in classes:
            there = attributes(trees()[f"extproc.{module}"], name)
            assert there, name
            assert there & by_room[room], name


PLANTED = """
class Part:
    on_end: object = None

    def __init__(self, pool):
        self.a, self.pool.on_room, pool.b = 1, 2, 3
        setattr(pool, "c", 4)
        made = Pool()
        made.d = 5
        made, given = Pool(), Pool
        pool.on_end = 6

    def later(self, made):
        made.e = 7
        del made.f
        for made.g in []:
            made.h += 8

    def again(self, one):
        one.i = 9
        one = Pool()
"""


def test_what_is_set_outside_of_its_class_is_found() -> None:
    found = [each.partition(" ")[0] for each in sets(ast.parse(PLANTED))]

    assert found == [
        *("self.pool.on_room", "pool.b", "pool.c", "made.d", "made.e", "made.f", "made.g"),
        *("made.h", "one.i"),
    ]


def test_policies_see_snapshots_and_never_the_pool() -> None:
    for room in ours("routing.picker", "routing.admission", "routing.policies"):
        assert list(wrong(room, lambda _, imported: imported != "extproc.pods.pool")) == []


def test_only_the_codec_and_the_services_import_protobuf_messages() -> None:
    """The wire carries bytes."""

    def is_allowed(_: str, imported: str) -> bool:
        return not is_in(imported, "envoy", "google", "extproc.gen")

    for part in ours("wire.server", "wire.rpc"):
        assert list(wrong(part, is_allowed)) == []


CONTEXTS = ("SSLContext", "create_default_context", "_create_unverified_context")
"""What makes a context of TLS."""
OUR_OWN_HTTP = ("stack", "commands.demo")
"""Rooms that ask processes alone that they have started, without TLS."""


def own_tls(tree: ast.Module) -> Iterator[str]:
    """Yield the calls that make a context of TLS, or have a library make one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {keyword.arg for keyword in node.keywords}
            needs = {"TCPConnector": "ssl", "ClientSession": "connector"}.get(
                name.removeprefix("aiohttp.")
            )
            if name.removeprefix("ssl.") in CONTEXTS or (needs and needs not in given):
                yield name


def test_contexts_of_tls_are_made_in_one_place() -> None:
    """So that every client and server accepts the same certificates."""
    apart = ours("files.tls", *OUR_OWN_HTTP)
    found = {module: list(own_tls(tree)) for module, tree in trees().items()}

    assert {m: calls for m, calls in found.items() if calls and not is_in(m, *apart)} == {}


def test_a_context_of_tls_that_is_made_elsewhere_is_found() -> None:
    planted = """
ssl.create_default_context(cafile="x")
SSLContext(ssl.PROTOCOL_TLS_SERVER)
aiohttp.TCPConnector(limit=0)
aiohttp.ClientSession(headers={})
aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=system_context()))
"""

    assert list(own_tls(ast.parse(planted))) == [
        *("ssl.create_default_context", "SSLContext", "aiohttp.TCPConnector"),
        "aiohttp.ClientSession",
    ]


def test_no_name_of_a_file_occurs_in_more_than_two_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for module in trees():
        parts = module.split(".")
        if len(parts) > 2 and parts[1] != "gen":
            rooms.setdefault(parts[-1], set()).add(parts[1])

    assert {name: found for name, found in rooms.items() if len(found) > 2} == {}


SEEN_BY_POLICIES = ("costs", "tenancy", "types")
"""The files whose classes a policy of a user gets: what a room may read of them, it may, too."""


def kept_apart(tree: ast.Module) -> set[str]:
    """Return the underscored attributes and methods of a module's classes."""
    found = {
        name
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
        for each in kind.body
        for name in (getattr(each, "name", ""), getattr(getattr(each, "target", each), "id", ""))
    }
    return {name for name in found if name.startswith("_") and not name.endswith("__")}


def test_no_room_reads_what_policies_may_not() -> None:
    files = ours(*SEEN_BY_POLICIES)
    names = {name for file in files if file in trees() for name in kept_apart(trees()[file])}
    found = [
        f"{module}: {ast.unparse(node)}"
        for module, tree in trees().items()
        if module not in files
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names
        if ast.unparse(node.value) not in ("self", "cls")
    ]

    assert found == []


GUESSED_BY_NOBODY = {
    *("Belief", "Layout", "Own", "Part", "Reach", "Row", "Scene"),
    *("aside", "beginnings", "charge_told", "claims", "floor", "keeping", "precedence", "slices"),
    *("straight", "tidings", "told_by", "traits", "usual", "vain_s", "verdicts", "words", "world"),
}
"""Names of parts from which a newcomer cannot tell what they are."""
WORDS_OF_NO_NAME = {
    *("beginning", "look", "looked", "looks", "others", "told", "turn", "turns", "untold", "vain"),
    "verdicts",
}
"""Words that do not help in longer names either."""
PUBLIC_NAMES = {"FOR_TURN", "has_own_turns", "num_told", "slot_turn_s", "turns"}
"""They are in the policy API, the configuration, reasons of a wait and files of workloads."""


def parts(tree: ast.Module) -> Iterator[str]:
    """Yield the names of classes, functions, attributes, constants and types that a module
    defines."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets = (each for target in statement.targets for each in ast.walk(target))
            yield from (each.id for each in targets if isinstance(each, ast.Name))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def is_guessed(name: str) -> bool:
    """Return whether a newcomer guesses what a part is by its name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    is_refused = name.lstrip("_") in GUESSED_BY_NOBODY or WORDS_OF_NO_NAME.intersection(words)
    return name in PUBLIC_NAMES or not is_refused


def test_the_name_of_a_part_is_one_that_a_newcomer_guesses() -> None:
    found = {
        f"{module.partition('.')[2]}: {name}"
        for module, tree in trees().items()
        for name in (module.rpartition(".")[2], *parts(tree))
        if not is_guessed(name)
    }

    assert found == set()


if __name__ == "__main__":  # for `make coverage`
    pure = (module for module in trees() if is_pure(module) and module != "extproc")
    paths = (module.replace(".", "/") for module in pure)
    print(",".join(f"{path}.py,{path}/__init__.py" for path in paths))


CEILINGS = {
    "files": 318,
    "wire": 2_526,
    "reports": 1_603,
    "learned": 1_712,
    "pods": 2_939,
    "envoy": 816,
    "queue": 909,
    "adapters": 4_033,
    "routing": 1_929,
    "request": 2_825,
    "peers": 1_025,
    "discovery": 1_906,
    "observe": 2_629,
    "config": 979,
    "service": 900,
    "plugins": 84,
    "stack": 286,
    "lab": 6_477,
    "commands": 2_394,
    "address": 60,
    "bounds": 29,
    "costs": 41,
    "errors": 13,
    "meters": 9,
    "openai": 87,
    "passes": 56,
    "paths": 99,
    "phrases": 51,
    "protocol": 12,
    "rejections": 74,
    "tenancy": 24,
    "types": 206,
}
"""Statements that each room has at most. A commit that raises one says why."""

NAMED_AFTER_OTHERS = ("config", "commands")
"""Rooms whose files have the names of what they are about: a section, a command."""


def num_statements(tree: ast.AST) -> int:
    """Return the statements without docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(tree)
    )


def above(ceilings: Mapping[str, int]) -> list[str]:
    """Return the rooms that have more statements than allowed."""
    found = list[str]()
    for room, most in ceilings.items():
        num = sum(
            num_statements(tree) for name, tree in trees().items() if is_in(name, *ours(room))
        )
        if num > most:
            found.append(f"{room}: {num} statements of {most}")
    return found


def test_no_room_is_above_its_ceiling() -> None:
    assert {*CEILINGS} == {*ARROWS, *WORDS} - {"__main__"}
    assert above(CEILINGS) == []


def twice(names: Iterable[tuple[str, str]]) -> list[str]:
    """Return each name that is given in several places, with those."""
    places = defaultdict[str, list[str]](list)
    for name, place in names:
        places[name].append(place)
    return [f"{name}: {', '.join(each)}" for name, each in places.items() if len(each) > 1]


def test_a_class_s_name_is_given_once() -> None:
    assert not twice(
        (node.name, module)
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def test_a_file_s_name_is_given_once() -> None:
    packages = {module.rpartition(".")[0] for module in trees()}
    assert not twice(
        (module.rpartition(".")[2], module)
        for module in trees()
        if not is_in(module, *ours(*NAMED_AFTER_OTHERS)) and module not in packages
    )
