"""Since when adapters have their slots, and whose request used one last."""

from __future__ import annotations

from extproc.pods.pool import Pool
from extproc.tenancy import Claim, SlotUse
from tests.builders import address, fill, pick, report, request
from tests.otherrouters import OtherRouter

CLAIM = Claim(tenant="t", priority=3)


def pool() -> Pool:
    made = fill(Pool(), 1, adapters="ab", load=report())
    return made


def test_a_slot_is_had_from_the_first_request_to_the_end_of_the_last() -> None:
    made = pool()
    info = request(model="a", adapter="a", claim=CLAIM)
    for number in (1, 2):
        made.flights.start(pick(f"aa-{number}", info=info), now=float(number))
    during = dict(made.slots(address(1)))
    made.flights.finish("aa-1", now=3.0)
    after_one = dict(made.slots(address(1)))
    made.flights.finish("aa-2", now=4.0)

    assert during == after_one == {"a": SlotUse(1.0, 2.0, 3, CLAIM.flow)}
    assert made.slots(address(1)) == {}


def test_what_others_tell_says_whose_turn_it_was_and_a_base_model_has_no_slot() -> None:
    made = pool()
    other = OtherRouter(made)
    claim = Claim(route="r", tenant="t", priority=7, has_own_turns=True)
    other.start("1", adapter="a", claim=claim, now=1.0)
    other.start("2", adapter="b", now=2.0)
    other.start("3", adapter=None, now=3.0)

    assert made.slots(address(1)) == {
        "a": SlotUse(1.0, 1.0, 7, "r t"),
        "b": SlotUse(2.0, 2.0, 0, Claim().flow),
    }


def test_nothing_is_known_of_an_endpoint_that_is_not_there() -> None:
    assert pool().slots(address(9)) == {}
