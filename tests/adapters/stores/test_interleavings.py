"""Two routers on one store, in any order, also within a write of the other: nothing is lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec import Struct

from extproc.adapters.stores.content import ConflictError, Medium
from extproc.adapters.stores.store import Store
from extproc.adapters.stores.writing import ANY_TAG
from tests.adapters.stores.media import RedisServer, declared, make_medium, shown
from tests.builders import Clock

NAMES = ("a", "A", "org/a")
DELETED = "deleted"


class Write(Struct):
    """What somebody wants written: a source, or nothing (deleted), or not even that (forgotten)."""

    kind: str
    name: str
    source: str
    with_tag: str


writes = st.builds(
    Write,
    st.sampled_from(["put", "put", "delete", "forget"]),
    st.sampled_from(NAMES),
    st.sampled_from(["/1", "/2"]),
    st.sampled_from(["none", "mine", "any"]),
)


class Interrupted:
    """A medium that lets somebody else write between the reading and the writing of a swap."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.medium, name)

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await self.medium.swap(name, old, new)


class TwoRouters(RuleBasedStateMachine):
    """Every answer that a writer gets is what a single writer would get on what is there then."""

    def __init__(self, kind: str, server: RedisServer | None) -> None:
        super().__init__()
        self.kind = kind
        self.server = server
        if server is not None:
            server.empty()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = Clock(1000.0)
        self.there: dict[str, str] = {}  # what should be there: a source, or DELETED
        self.media = [Interrupted(self.make()) for _ in range(2)]
        self.stores = [Store(medium) for medium in self.media]  # type: ignore[arg-type]
        for store in self.stores:
            self.runner.run(store.poll())

    def make(self) -> Medium:
        return make_medium(self.kind, self.folder, self.server, self.clock)

    def expected(self, router: int, write: Write) -> str:
        """Return what the writer should be told, and note what should be there then."""
        there = self.there.get(write.name)
        declared_there = None if there in (None, DELETED) else there
        if write.kind == "forget":
            if there == DELETED:
                del self.there[write.name]
            return "done"
        tag = self.tag(router, write)
        if tag is not None:
            if declared_there is None or (tag != ANY_TAG and tag != self.tags.get(write.name)):
                return "conflict"
        elif write.kind == "put" and declared_there not in (None, write.source):
            return "conflict"
        if write.kind == "delete":
            if declared_there is None:
                return "nothing"
            self.there[write.name] = DELETED
            if self.kind == "directory":  # a file that is gone
                del self.there[write.name]
            return "done"
        if declared_there == write.source:
            return "none"
        self.there[write.name] = write.source
        return "created" if declared_there is None else "replaced"

    def tag(self, router: int, write: Write) -> str | None:
        if write.with_tag == "none":
            return None
        stored = self.stores[router].entries.get(write.name)
        return ANY_TAG if write.with_tag == "any" or stored is None else stored.tag

    @property
    def tags(self) -> dict[str, str]:
        """The tags of what is there now."""
        fresh = Store(self.make())
        self.runner.run(fresh.poll())
        self.runner.run(fresh.aclose())
        return {name: stored.tag for name, stored in fresh.entries.items()}

    async def carry_out(self, router: int, write: Write, tag: str | None) -> str:
        store = self.stores[router]
        try:
            if write.kind == "forget":
                await store.forget(write.name)
                return "done"
            if write.kind == "delete":
                return "done" if await store.delete(write.name, if_match=tag) else "nothing"
            put = await store.put(declared(write.name, write.source), if_match=tag)
            return put.change
        except ConflictError:
            return "conflict"

    @rule(router=st.integers(0, 1), write=writes)
    def write(self, router: int, write: Write) -> None:
        tag = self.tag(router, write)
        expected = self.expected(router, write)

        assert self.runner.run(self.carry_out(router, write, tag)) == expected

    @rule(
        router=st.integers(0, 1),
        name=st.sampled_from(NAMES),
        source=st.sampled_from(["/1", "/2"]),
        other=st.sampled_from(["/1", "/2", DELETED]),
    )
    def write_while_the_other_writes(self, router: int, name: str, source: str, other: str) -> None:
        """Both without a tag: the one that comes later is told what the other one did."""
        kind = "delete" if other == DELETED else "put"
        first = Write(kind, name, other, "none")
        second = Write("put", name, source, "none")
        if self.there.get(name, DELETED) != DELETED and self.there[name] != source:
            return  # refused before it writes
        if self.there.get(name) == source:
            return  # nothing to write
        answers: list[str] = []

        async def meanwhile() -> None:
            answers.append(await self.carry_out(1 - router, first, None))

        self.media[router].meanwhile = meanwhile
        answer = self.runner.run(self.carry_out(router, second, None))
        expected = [self.expected(1 - router, first), self.expected(router, second)]

        assert [*answers, answer] == expected

    @rule(router=st.integers(0, 1))
    def look(self, router: int) -> None:
        self.runner.run(self.stores[router].poll())

        assert shown(self.stores[router]) == self.there

    @rule(router=st.integers(0, 1))
    def restart(self, router: int) -> None:
        self.runner.run(self.stores[router].aclose())
        self.media[router] = Interrupted(self.make())
        self.stores[router] = Store(self.media[router])  # type: ignore[arg-type]
        self.runner.run(self.stores[router].poll())

    @invariant()
    def nothing_is_lost(self) -> None:
        fresh = Store(self.make())
        self.runner.run(fresh.poll())
        self.runner.run(fresh.aclose())

        assert shown(fresh) == self.there

    def teardown(self) -> None:
        for store in self.stores:
            self.runner.run(store.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)


def test_no_interleaving_of_two_routers_loses_a_declaration(
    kind: str, server: RedisServer | None
) -> None:
    run_state_machine_as_test(
        lambda: TwoRouters(kind, server),  # type: ignore[arg-type]
        settings=settings(stateful_step_count=15),
    )
