"""One meaning of each name, kept up to date as endpoints list and leave."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.pods.modelindex import NOTHING, Listing, ModelIndex
from extproc.types import ModelCard

CARDS = st.builds(
    ModelCard,
    st.sampled_from("ab"),
    st.sampled_from([None, "base", "other"]),
    st.sampled_from(["", "/x"]),
    st.integers(0, 3),
    st.sampled_from([None, 9]),
)
CHANGES = st.lists(st.tuples(st.integers(0, 4), st.lists(CARDS, max_size=3)), max_size=12)
"""Numbers of endpoints, and what they list from then on."""


class Scene:
    """An index, and what its endpoints list."""

    def __init__(self) -> None:
        self.index = ModelIndex()
        self.lists: dict[int, Listing] = {}

    def lists_now(self, number: int, cards: Sequence[ModelCard]) -> None:
        before = self.lists.get(number, NOTHING)
        after = self.index.listing(cards, before)
        self.index.replace(before, after)
        self.lists[number] = after

    def shown(self, name: str) -> list[ModelCard]:
        """What the endpoints show under a name."""
        return [cards[name] for cards in self.lists.values() if name in cards]


def content(card: ModelCard) -> ModelCard:
    return replace(card, created_wall_s=0)


@given(CHANGES)
def test_each_name_has_the_card_that_most_show_however_they_came_to_it(
    changes: Sequence[tuple[int, Sequence[ModelCard]]],
) -> None:
    scene = Scene()
    for change in changes:
        scene.lists_now(*change)
        by_name = scene.index.by_name
        assert by_name.keys() == {name for cards in scene.lists.values() for name in cards}
        for name, card in by_name.items():
            shown = scene.shown(name)
            num_adapters = sum(each.parent is not None for each in shown)
            assert (card.parent is not None) is (2 * num_adapters >= len(shown))
            agreeing = [e for e in shown if (e.parent is not None) is (card.parent is not None)]
            counts = Counter(map(content, agreeing))
            assert counts[content(card)] == max(counts.values())
        bases_first = scene.index.bases_first
        assert bases_first.keys() == by_name.keys()
        for name, card in bases_first.items():
            is_doubted = name in scene.index.doubted
            shown = scene.shown(name)
            num_bases = sum(each.parent is None for each in shown)
            assert is_doubted is (2 * num_bases == len(shown))
            assert (card.parent is None) is (2 * num_bases >= len(shown))
            assert card == (scene.index.doubted if is_doubted else by_name)[name]


@given(CHANGES)
def test_the_cards_are_another_object_where_one_of_them_is_another_and_never_else(
    changes: Sequence[tuple[int, Sequence[ModelCard]]],
) -> None:
    scene = Scene()
    for change in changes:
        before, cards_before = scene.index.by_name, dict(scene.index.by_name)
        scene.lists_now(*change)

        assert (scene.index.by_name is before) is (scene.index.by_name == cards_before)
        assert before == cards_before


@given(CHANGES)
def test_endpoints_that_agree_share_one_card(
    changes: Sequence[tuple[int, Sequence[ModelCard]]],
) -> None:
    scene = Scene()
    for change in changes:
        scene.lists_now(*change)
        for name in scene.index.by_name:
            shown = scene.shown(name)
            assert len(set(map(id, shown))) == len(set(map(content, shown)))


def test_nothing_is_left_of_names_that_nobody_lists() -> None:
    scene = Scene()
    for number in (1, 2):
        scene.lists_now(number, [ModelCard("a"), ModelCard("b", "base")])
    for number in (1, 2):
        scene.lists_now(number, [])

    assert not scene.index.by_name
    assert not scene.index._meanings


def test_a_name_that_one_endpoint_lists_takes_few_bytes() -> None:
    """Names cost nothing to invent: 32 endpoints may each list ten thousand of their own."""
    num, scene = 10_000, Scene()
    cards = [ModelCard(f"adapter-{number}", "base") for number in range(num)]
    tracemalloc.start()
    try:
        scene.lists_now(0, cards)
        taken_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert taken_bytes < 250 * num


def test_where_as_many_show_either_the_first_stays() -> None:
    scene = Scene()
    for number, root in enumerate(["/x", "/y", "/y", "/x"]):
        scene.lists_now(number, [ModelCard("a", "base", root)])

    assert scene.index.by_name["a"].root == "/x"


def test_endpoints_that_list_the_same_names_share_them_in_whatever_order() -> None:
    scene, both = Scene(), [ModelCard("a"), ModelCard("b", "base")]
    for number, cards in enumerate((both, both[:1], both[::-1], both[:1])):
        scene.lists_now(number, cards)
    names = [listing.names for listing in scene.lists.values()]

    assert names == [{"a", "b"}, {"a"}, {"a", "b"}, {"a"}]
    assert len(set(map(id, names))) == 2
    assert [*scene.lists[2]] == ["b", "a"]


def test_of_two_no_endpoint_makes_the_other_ones_context_short() -> None:
    for lengths in ((1, 4096), (4096, 1), (1, None), (None, 1)):
        scene = Scene()
        for number, length in enumerate(lengths):
            scene.lists_now(number, [ModelCard("base", max_model_len=length)])

        length = scene.index.by_name["base"].max_model_len
        assert length == (None if None in lengths else 4096)
