"""The answer to `GET /v1/models`, encoded once for each state of the registry."""

from __future__ import annotations

import json

from extproc.core.listing import ModelListing
from extproc.core.pool import Pool
from tests.builders import BASE, address, cards, endpoint


def pool() -> Pool:
    made = Pool()
    made.set_endpoints([endpoint(1), endpoint(2)])
    for number in (1, 2):
        made.record_models(address(number), cards("a", "b"), now=0.0)
    return made


def names(body: bytes) -> list[str]:
    return [each["id"] for each in json.loads(body)["data"]]


def test_the_body_is_the_same_bytes_as_long_as_nothing_changes() -> None:
    listing, made = ModelListing(), pool()
    body = listing.body(made.registry)
    for number in (1, 2):
        made.record_models(address(number), cards("a", "b"), now=1.0)

    assert listing.body(made.registry) is body
    assert names(body) == [BASE, "a", "b"]


def test_a_change_of_any_kind_shows_at_once() -> None:
    listing, made = ModelListing(), pool()
    seen = [names(listing.body(made.registry))]
    for number in (1, 2):
        made.record_models(address(number), cards("a", "b", "c"), now=1.0)
    seen.append(names(listing.body(made.registry)))
    for number in (1, 2):
        made.record_models(address(number), cards("b", "c"), now=2.0)
    seen.append(names(listing.body(made.registry)))
    made.set_endpoints([])
    seen.append(names(listing.body(made.registry)))

    assert seen == [[BASE, "a", "b"], [BASE, "a", "b", "c"], [BASE, "b", "c"], []]


def test_a_listing_that_says_the_same_again_leaves_what_is_registered_as_it_was() -> None:
    made = pool()
    before = made.registry, made.snapshot(now=1.0).endpoints[0].registered
    made.record_models(address(1), cards("a", "b"), now=2.0)

    assert made.registry is before[0]
    assert made.snapshot(now=2.0).endpoints[0].registered is before[1]
