"""The answer to `GET /v1/models`, encoded once for each state of what it lists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.openai import NAMES_A_PASS, model_body
from extproc.passes import last
from extproc.pods.pool import Pool
from extproc.routing.models import Aliases, ModelListing
from extproc.types import ModelCard
from tests.builders import BASE, address, cards, fill, models_body

CARDS = st.builds(
    ModelCard,
    st.sampled_from(["a", "b", 'q"\u00e9']),
    st.sampled_from([None, BASE]),
    st.sampled_from(["", "/x"]),
    st.integers(0, 2),
)
CHANGES = st.lists(st.tuples(st.integers(1, 3), st.lists(CARDS, max_size=3)), max_size=10)
"""Numbers of endpoints, and what they list from then on."""


def pool() -> Pool:
    return fill(Pool(), 1, 2, adapters="ab")


def body(listing: ModelListing, made: Pool, *numbers: int) -> bytes:
    """What the endpoints of these numbers list, all of them where there are none."""
    wanted = {address(number) for number in numbers or (1, 2)}
    views = [view for view in made.snapshot(now=1.0).endpoints if view.address in wanted]
    return listing.body(made.models.by_name, [view.registered or frozenset() for view in views])


def names(body: bytes) -> list[str]:
    return [each["id"] for each in json.loads(body)["data"]]


def test_the_body_is_the_same_bytes_as_long_as_nothing_changes() -> None:
    listing, made = ModelListing(Aliases()), pool()
    before = body(listing, made)
    for number in (1, 2):
        made.record_models(address(number), cards("a", "b"), now=1.0)

    assert body(listing, made) is before
    assert body(listing, made, 2) is before, "another endpoint, with the same models"
    assert names(before) == [BASE, "a", "b"]


def test_a_change_of_any_kind_shows_at_once() -> None:
    listing, made = ModelListing(Aliases()), pool()
    seen = [names(body(listing, made))]
    for number in (1, 2):
        made.record_models(address(number), cards("a", "b", "c"), now=1.0)
    seen.append(names(body(listing, made)))
    for number in (1, 2):
        made.record_models(address(number), cards("b", "c"), now=2.0)
    seen.append(names(body(listing, made)))
    made.set_endpoints([])
    seen.append(names(body(listing, made)))

    assert seen == [[BASE, "a", "b"], [BASE, "a", "b", "c"], [BASE, "b", "c"], []]


def test_only_what_the_endpoints_asked_about_have_is_listed() -> None:
    listing, made = ModelListing(Aliases()), pool()
    made.record_models(address(2), cards("b", "c"), now=1.0)

    assert names(body(listing, made, 1)) == [BASE, "a", "b"]
    assert names(body(listing, made, 2)) == [BASE, "b", "c"]
    assert names(body(listing, made)) == [BASE, "a", "b", "c"]


def test_a_listing_that_says_the_same_again_leaves_what_is_registered_as_it_was() -> None:
    made = pool()
    before = made.models.by_name, made.snapshot(now=1.0).endpoints[0].registered
    made.record_models(address(1), cards("a", "b"), now=2.0)

    assert made.models.by_name is before[0]
    assert made.snapshot(now=2.0).endpoints[0].registered is before[1]


@given(CHANGES)
def test_after_any_changes_the_body_is_as_if_it_were_made_anew(
    changes: Sequence[tuple[int, Sequence[ModelCard]]],
) -> None:
    listing, made = ModelListing(Aliases()), fill(Pool(), 1, 2, 3)
    for now, (number, listed) in enumerate(changes):
        made.record_models(address(number), listed, now=float(now))
        whole = body(ModelListing(Aliases()), made, 1, 2, 3)

        assert body(listing, made, 1, 2, 3) == whole
        assert last(listing.part(made.models.by_name, made.models.by_name.keys())) == whole
        assert listing._encoded.keys() == made.models.by_name.keys(), "no more than what is listed"


@given(st.lists(CARDS, unique_by=lambda card: card.id))
def test_a_list_has_each_model_as_it_is_shown_alone(listed: Sequence[ModelCard]) -> None:
    shown = json.loads(models_body(listed))["data"]

    assert shown == [
        json.loads(model_body(card))
        for card in sorted(listed, key=lambda card: (card.parent is not None, card.id))
    ]


def test_aliases_of_many_targets_are_looked_through_once_for_each_state() -> None:
    looks = Counter[str]()

    class Targets(Mapping[str, Sequence[str]]):
        """Counts who looks through them."""

        def __getitem__(self, name: str) -> Sequence[str]:
            raise KeyError(name)

        def __iter__(self) -> Iterator[str]:
            looks["all"] += 1
            yield from (f"alias-{number}" for number in range(4000))

        def __len__(self) -> int:
            return 4000

        def items(self) -> Any:
            return [(name, ("x", "y", "a")) for name in self]

    aliases, made = Aliases(), pool()
    aliases.configure(Targets())
    listing = ModelListing(aliases)
    shown = [body(listing, made) for _ in range(10)]

    assert len(names(shown[0])) == 4003
    assert all(each is shown[0] for each in shown)
    assert looks == {"all": 1}
    made.record_models(address(1), cards("a", "b", "c"), now=1.0)
    assert len(names(body(listing, made))) == 4004
    assert looks == {"all": 2}
    aliases.configure({"other": ("c",)})
    assert names(body(listing, made)) == [BASE, "a", "b", "c", "other"]
    assert listing._encoded.keys() == {BASE, "a", "b", "c", "other"}


def test_a_long_list_is_made_in_passes_each_over_a_part_of_it() -> None:
    num, passes = 20 * NAMES_A_PASS, list[bytes]()
    listed = cards(*(f"a{number:05d}" for number in range(num)))
    made, targets = fill(Pool(), 1, 2), [f"a{number:05d}" for number in range(100)]
    for number in (1, 2):
        made.record_models(address(number), listed[number:], now=1.0)
    aliases = Aliases()
    aliases.configure({f"z{number}": targets for number in range(500)})
    listing = ModelListing(aliases)
    lists = [view.registered or frozenset() for view in made.snapshot(now=1.0).endpoints]
    most, looks = 0, Looks(made.models.by_name)
    for part in listing.make(looks, lists):
        most, looks.num = max(most, looks.num), 0
        passes.append(part)

    assert passes[:-1] == [b""] * (len(passes) - 1)
    assert len(names(passes[-1])) == len(made.models.by_name) + 500
    assert len(passes) > num / NAMES_A_PASS
    assert most < 8 * NAMES_A_PASS
    name = listed[-1].id
    assert names(last(listing.make({name: listed[-1]}, lists))) == [name]
    assert listing._encoded.keys() - aliases.targets.keys() == {name}


class Looks(dict[str, ModelCard]):
    """A registry that counts the looks at it."""

    num = 0

    def __getitem__(self, name: str) -> ModelCard:
        self.num += 1
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.num += 1
        return super().__contains__(name)
