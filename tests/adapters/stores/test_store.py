"""What a store promises, whatever keeps its contents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from extproc.adapters.declared import (
    ITEMS_A_PLACE,
    AliasTarget,
    Declaration,
    DeclarationError,
    Terms,
)
from extproc.adapters.stores.content import (
    ConflictError,
    Medium,
    Put,
    Stored,
    StoreError,
    StoreFullError,
)
from extproc.adapters.stores.store import MAX_ATTEMPTS, SETTLED_AFTER
from extproc.adapters.stores.writing import ANY_TAG, BulkError
from tests.adapters.stores.media import STRICT_KINDS, Opened, declared, following, shown
from tests.waiting import eventually

NAMES = ("a", "A", "org/name", ".", "..", "-", "CON", "a b", "ü", "+", "x" * 256, "ü" * 128)


async def test_an_empty_store_says_that_it_is_empty(media: Opened) -> None:
    store = await media.store()

    assert store.seen == [{}]


@pytest.mark.parametrize("name", NAMES)
async def test_any_name_is_kept_apart_from_all_others(media: Opened, name: str) -> None:
    store = await media.store()
    for each in NAMES:
        await store.put(declared(each, f"/of/{NAMES.index(each)}"))
    other = await media.store()

    assert other.entries[name].declaration == declared(name, f"/of/{NAMES.index(name)}")
    assert other.entries.keys() == set(NAMES)


async def test_every_field_is_kept(media: Opened) -> None:
    all_of_it = declared(
        version="2",
        base="base",
        rank=16,
        min_replicas=2,
        max_replicas=3,
        load="lazy",
        terms=Terms(frozenset({"acme", "b"}), 7),
    )
    alias = declared("x", "", terms=Terms(priority=-1, targets=(AliasTarget("org/a", 0.5),)))
    store = await media.store()
    for each in (all_of_it, alias):
        await store.put(each)
    entries = (await media.store()).entries

    assert [entries[name].declaration for name in ("org/a", "x")] == [all_of_it, alias]


async def test_a_declaration_is_created_once_and_the_same_changes_nothing(media: Opened) -> None:
    store = await media.store()
    first = await store.put(declared())
    second = await store.put(declared())

    assert (first.change, second.change) == ("created", "none")
    assert first.tag == second.tag == store.entries["org/a"].tag
    assert len(store.seen) == 2


async def test_several_are_declared_as_one(media: Opened) -> None:
    store = await media.store()
    await store.put(declared("b"))
    puts = await store.put_all([declared("a"), declared("b"), declared("c")])
    edited = await store.put_all([declared("a", "/other"), declared("d")], replaces=True)
    other = await media.store()

    assert [each.change for each in puts] == ["created", "none", "created"]
    assert [each.change for each in edited] == ["replaced", "created"]
    assert other.entries.keys() == set("abcd")
    assert [other.entries[each].tag for each in "ad"] == [each.tag for each in edited]


async def test_of_several_with_one_that_cannot_be_none_is_declared(media: Opened) -> None:
    store = await media.store()
    await store.put(declared("b"))
    with pytest.raises(BulkError) as refused:
        await store.put_all([declared("a"), declared("b", "/other"), declared("a@2")])

    assert refused.value.errors.keys() == {1, 2}
    assert (await media.store()).entries.keys() == {"b"}


async def test_another_content_needs_the_tag_of_the_one_that_it_replaces(media: Opened) -> None:
    store = await media.store()
    tag = (await store.put(declared())).tag
    with pytest.raises(ConflictError, match="already declared with other content") as plain:
        await store.put(declared(source="/other"))
    with pytest.raises(ConflictError, match="changed since") as wrong:
        await store.put(declared(source="/other"), if_match="0" * 32)
    put = await store.put(declared(source="/other"), if_match=tag)

    assert plain.value.tag == wrong.value.tag == tag
    assert put.change == "replaced"
    assert store.entries["org/a"].tag == put.tag != tag


async def test_a_tag_needs_something_to_replace(media: Opened) -> None:
    store = await media.store()
    with pytest.raises(ConflictError, match="not declared"):
        await store.put(declared(), if_match=ANY_TAG)
    await store.put(declared())
    await store.put(declared(source="/b"), if_match=ANY_TAG)

    assert shown(store) == {"org/a": "/b"}


@pytest.mark.parametrize("kind", STRICT_KINDS)
async def test_what_is_deleted_stays_known_until_it_is_forgotten(media: Opened) -> None:
    store = await media.store()
    await store.put(declared(version="1"))
    await store.forget("org/a")
    was_there, is_there = await store.delete("org/a"), await store.delete("org/a")
    restarted = await media.store()
    kept = restarted.entries["org/a"]
    await restarted.forget("org/a")
    await store.poll()

    assert (was_there, is_there) == (True, False)
    assert (kept.is_deleted, kept.declaration) == (True, declared(version="1"))
    assert shown(store) == shown(restarted) == shown(await media.store()) == {}


async def test_a_deletion_with_a_wrong_tag_is_none(media: Opened) -> None:
    store = await media.store()
    tag = (await store.put(declared())).tag
    with pytest.raises(ConflictError):
        await store.delete("org/a", if_match="0" * 32)
    await store.delete("org/a", if_match=tag)
    with pytest.raises(ConflictError, match="not declared"):
        await store.delete("org/a", if_match=tag)

    assert shown(store).get("org/a", "deleted") == "deleted"


async def test_what_is_deleted_can_be_declared_anew_and_is_not_forgotten_then(
    media: Opened,
) -> None:
    store = await media.store()
    await store.put(declared())
    await store.delete("org/a")
    put = await store.put(declared(source="/b"))
    await store.forget("org/a")

    assert put.change == "created"
    assert shown(store) == shown(await media.store()) == {"org/a": "/b"}


async def test_others_see_each_write_and_who_wrote_it_sees_it_once(media: Opened) -> None:
    one, other = await media.store(), await media.store()
    async with following(one), following(other):
        await one.put(declared())
        await eventually(lambda: shown(other) == {"org/a": "/adapters/a"})
        await other.delete("org/a")
        await eventually(lambda: shown(one).get("org/a", "deleted") == "deleted")
        await one.forget("org/a")
        await eventually(lambda: shown(other) == {})

    assert len(one.seen) == len(other.seen) == (4 if media.make().keeps_deleted else 3)


@pytest.mark.parametrize("kind", STRICT_KINDS)
async def test_of_two_who_write_at_once_one_is_told(media: Opened) -> None:
    stores = [await media.store() for _ in range(8)]
    done = await asyncio.gather(
        *(store.put(declared(source=f"/{each}")) for each, store in enumerate(stores)),
        return_exceptions=True,
    )
    (winner,) = [each for each, put in enumerate(done) if not isinstance(put, BaseException)]

    assert {type(each) for each in done if isinstance(each, BaseException)} == {ConflictError}
    assert shown(await media.store()) == {"org/a": f"/{winner}"}


async def test_of_two_who_write_different_adapters_at_once_neither_is_lost(media: Opened) -> None:
    stores = [await media.store() for _ in range(4)]
    puts = (store.put(declared(f"a{n}-{i}")) for i, store in enumerate(stores) for n in range(5))
    await asyncio.gather(*puts)

    assert len(shown(await media.store())) == 20


async def test_a_write_before_the_first_look_hands_nothing_on(media: Opened) -> None:
    """A part of the declarations would look like all."""
    await (await media.store()).put(declared("a"))
    late = await media.store(media.make())
    late.seen.clear()
    unread = type(late)(media.make())
    await unread.put(declared("b"))
    seen = list(unread.seen)
    await unread.poll()
    await unread.aclose()

    assert seen == []
    assert unread.seen[0].keys() == {"a", "b"}


@pytest.mark.parametrize("kind", STRICT_KINDS)
async def test_one_has_the_lease_until_it_gives_it_up(media: Opened) -> None:
    one, other = await media.store(), await media.store()
    took = [await one.lease("one"), await other.lease("other"), await one.lease("one")]
    await other.release("other")
    still = await other.lease("other")
    await one.release("one")

    assert (took, still) == ([True, False, True], False)
    assert await other.lease("other")


async def test_an_unusable_content_keeps_the_last_good_one_and_is_named(media: Opened) -> None:
    one, other = await media.store(), media.make()
    await one.put(declared())
    content = await other.get("org/a")
    assert content is not None
    for bad in (b'{"name": "org/a", "rank": 9999}', b'{"name": "org/a", "source": "s3://x"}'):
        assert await other.swap("org/a", content, bad)
        for _ in range(SETTLED_AFTER):
            await one.poll()
        content = bad
    with pytest.raises(ConflictError, match="cannot be used"):
        await one.put(declared(source="/b"), if_match=ANY_TAG)
    problems = dict(one.problems)
    await other.swap("org/a", content, b'{"name": "org/a", "source": "/repaired", "new": [1]}')
    await one.poll()
    await other.aclose()

    assert shown(one) == {"org/a": "/repaired"}
    assert [entries.keys() for entries in one.seen] == [set(), {"org/a"}, {"org/a"}]
    assert len(problems) == 1
    assert "is not fetched here" in str(problems)
    assert (len(one.failures), one.num_recoveries, dict(one.problems)) == (2, 1, {})


async def test_a_new_router_reads_the_good_ones_beside_a_bad_one(media: Opened) -> None:
    store, medium = await media.store(), media.make()
    await store.put(declared("good"))
    await medium.swap("bad", None, b'{"name": "bad", "source": 7}')
    await medium.aclose()

    assert shown(await media.store()) == {"good": "/adapters/a"}


async def test_a_router_knows_all_once_what_was_bad_when_it_started_is_repaired_or_gone(
    media: Opened,
) -> None:
    """It may be the word that an adapter was deleted. What turns bad later has been known."""
    medium = media.make()
    bad, also = b'{"name": "bad", "deleted": tr', b"half a "
    await medium.swap("bad", None, bad)
    await medium.swap("also", None, also)
    store = await media.store()
    told = [store.is_complete]
    for name, old, new in (
        ("bad", bad, b'{"name": "bad", "deleted": true}'),
        ("also", also, None),
        ("later", None, b"half"),
    ):
        await medium.swap(name, old, new)
        await store.poll()
        told.append(store.is_complete)
    await medium.aclose()

    assert (store.is_known, told) == (True, [False, False, True, True])


async def test_a_declaration_that_is_too_large_is_refused(media: Opened) -> None:
    store = await media.store()
    with pytest.raises(DeclarationError, match="larger than 8192 bytes"):
        await store.put(declared(source="/" + "a" * 70_000))

    assert shown(store) == {}


@pytest.mark.parametrize("kind", STRICT_KINDS)
async def test_there_is_a_limit_which_the_deleted_count_for(
    media: Opened, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("store", kind):
        monkeypatch.setattr(f"extproc.adapters.stores.{each}.MAX_DECLARATIONS", 3)
    store = await media.store()
    for name in "abc":
        await store.put(declared(name))
    await store.delete("a")
    with pytest.raises(StoreError, match="3 declarations are there"):
        await store.put(declared("d"))
    await store.put(declared("b", "/b"), if_match=ANY_TAG)
    await store.forget("a")
    await store.put(declared("d"))

    assert shown(store).keys() == {"b", "c", "d"}


def alias(name: str, num_targets: int) -> Declaration:
    targets = tuple(AliasTarget(f"model-{number}") for number in range(num_targets))
    return declared(name, "", terms=Terms(targets=targets))


async def test_many_tenants_and_targets_take_more_places(
    media: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they are written, and however they came there."""
    for each in ("store", "writing"):
        monkeypatch.setattr(f"extproc.adapters.stores.{each}.MAX_DECLARATIONS", 6)
    store = await media.store()
    await store.poll()
    wide = alias("wide", 2 * ITEMS_A_PLACE + 1)  # three places
    await store.put(wide)
    assert len(await store.put_all([declared("a"), alias("b", ITEMS_A_PLACE - 1)])) == 2
    for too_much in ([alias("c", ITEMS_A_PLACE)], [declared("c"), declared("d")]):
        with pytest.raises(StoreFullError, match="of 6 places are taken; . takes"):
            await store.put_all(too_much)
    with pytest.raises(StoreFullError, match="5 of 6 places are taken; c takes 2"):
        await store.put(alias("c", 2 * ITEMS_A_PLACE - 1))
    await store.put(alias("wide", ITEMS_A_PLACE), if_match=ANY_TAG)
    await store.put(alias("c", 2 * ITEMS_A_PLACE - 1))
    assert shown(store).keys() == {"wide", "a", "b", "c"}

    monkeypatch.setattr("extproc.adapters.stores.store.MAX_DECLARATIONS", 5)
    other = await media.store()
    await other.poll()
    assert len(other.entries) == 3
    assert list(other.problems.values()) == ["only declarations that take 5 places count"]


class Restless:
    """A medium on which somebody else is always faster."""

    def __init__(self) -> None:
        self.num_swaps = 0

    async def get(self, name: str) -> bytes | None:
        return None

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        self.num_swaps += 1
        return False


async def test_who_never_gets_a_turn_is_told() -> None:
    from extproc.adapters.stores.store import Store

    medium = Restless()
    with pytest.raises(StoreError, match="other writers keep changing it"):
        await Store(medium).put(declared())  # type: ignore[arg-type]

    assert medium.num_swaps == MAX_ATTEMPTS


@pytest.mark.parametrize(("first", "second"), [("sql", "sql@2"), ("sql@2", "sql")])
async def test_names_that_pods_could_mistake_for_each_other_are_a_conflict(
    media: Opened, first: str, second: str
) -> None:
    store = await media.store()
    await store.put(declared(first, version="2" if first == "sql" else ""))
    with pytest.raises(ConflictError, match="which is declared"):
        await store.put(declared(second))
    await store.delete(first)
    await store.put(declared(second))

    assert shown(store)[second] == "/adapters/a"
    assert shown(store).get(first, "deleted") == "deleted"


async def test_of_names_that_were_declared_at_the_same_moment_the_shorter_one_counts(
    media: Opened,
) -> None:
    one, other = await media.store(), await media.store()
    await one.put(declared("sql@2"))
    await other.put(declared("sql"))
    await one.poll()

    assert shown(one) == shown(other) == {"sql": "/adapters/a"}
    assert "versions of sql, which is declared" in one.problems["sql@2"]
    await one.delete("sql@2")
    assert dict(one.problems) == {}


class Noting:
    """A medium that notes what is written, in order."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.written: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.medium, name)

    def has_written(self, name: str) -> bool:
        return name in self.written

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        done = await self.medium.swap(name, old, new)
        self.written.append(name)
        return done


async def test_lists_of_one_writer_hold_no_other_one_up(media: Opened) -> None:
    """Each write is a turn: of many lists at most one write is before another writer's."""
    medium = Noting(media.make())
    store = await media.store(medium)  # type: ignore[arg-type]
    lists = [[declared(f"a-{k}-{n:02d}") for n in range(30)] for k in range(4)]
    running = [asyncio.ensure_future(store.put_all(each, by="a")) for each in lists]
    others, putting = list[int](), list[asyncio.Future[Put]]()
    await eventually(lambda: len(medium.written) > 5, every_s=0)
    for number in range(5):
        name, num_before = f"b-{number}", len(medium.written)
        putting.append(asyncio.ensure_future(store.put(declared(name), by="b")))
        # Until it is written, and not until all have been told, which follows after a rest.
        await eventually(partial(medium.has_written, name), every_s=0)
        others.append(medium.written.index(name) - num_before)
    assert not any(each.done() for each in running[1:]), "the last ones are at it still"
    await asyncio.gather(*running, *putting)

    # One is being written, one is ahead in the line, and a look may come between.
    assert max(others) <= 3
    assert len(store.entries) == 125


async def test_a_list_between_which_others_write_is_declared_whole_or_not_at_all(
    media: Opened,
) -> None:
    store = await media.store()
    names = [f"a-{n:02d}" for n in range(20)]
    writing = asyncio.ensure_future(store.put_all([declared(name) for name in names], by="a"))
    for name in reversed(names[-3:]):
        await store.put(declared(name, "/of/b"), if_match=None, by="b")
    with pytest.raises(BulkError) as caught:
        await writing

    assert {names[at] for at in caught.value.errors} <= set(names[-3:])
    assert shown(store) == dict.fromkeys(names[-3:], "/of/b")


@pytest.mark.parametrize(("listed", "single"), [("sql@2", "sql"), ("sql", "sql@2")])
async def test_names_that_pods_could_mistake_are_a_conflict_while_a_list_is_written(
    media: Opened, listed: str, single: str
) -> None:
    medium = Noting(media.make())
    store = await media.store(medium)  # type: ignore[arg-type]
    after = [declared(f"a-{n:02d}") for n in range(20)]
    writing = asyncio.ensure_future(store.put_all([declared(listed), *after], by="a"))
    await eventually(lambda: listed in medium.written)
    with pytest.raises(ConflictError, match="which is declared"):
        await store.put(declared(single), by="b")
    await writing

    await store.delete(listed)
    writing = asyncio.ensure_future(
        store.put_all([*after, declared(listed)], replaces=True, by="a")
    )
    await store.put(declared(single), by="b")
    with pytest.raises(BulkError):
        await writing
    assert single in store.entries


async def test_those_who_write_at_once_wait_for_one_look_and_each_finds_its_own_in_it(
    media: Opened,
) -> None:
    store = await media.store()
    num_before = len(store.seen)

    async def put(number: int) -> None:
        await store.put(declared(f"a{number}"), by=f"w{number}")
        assert f"a{number}" in store.entries

    await asyncio.gather(*map(put, range(10)))

    assert len(store.seen) == num_before + 1


async def test_what_a_writer_who_left_was_handing_on_is_handed_on_by_the_next_look(
    media: Opened,
) -> None:
    """Its task ends between two passes, of which the rest are not made."""
    store, is_in_the_middle = await media.store(), asyncio.Event()
    finished: list[str] = []

    def passes(entries: Mapping[str, Stored]) -> Iterator[None]:
        is_in_the_middle.set()
        yield
        finished.extend(entries)

    store._on_entries = passes
    writing = asyncio.create_task(store.put(declared("a")))
    await is_in_the_middle.wait()
    writing.cancel()
    await asyncio.wait([writing])
    assert finished == []

    await store.poll()

    assert finished == ["a"]
