"""Who served in another's place shows what else in a gateway chooses."""

from __future__ import annotations

from extproc.learned.lately import WINDOW_S, Lately
from extproc.pods.servers import Servers
from tests.builders import address, pick

PICK = pick(endpoints=(address(1), address(2)), alternates=(address(3),))


def test_the_choice_and_a_fallback_that_the_pick_named_are_as_they_should_be() -> None:
    servers = Servers()
    for number in (1, 2, 3):
        servers.record(PICK, address(number), is_known=True)

    assert servers.num == {"chosen": 1, "fallback": 2, "other": 0, "unknown": 0}
    assert servers.warnings() == []


def test_others_are_counted_by_whether_they_are_known_and_warned_of_for_a_while() -> None:
    servers = Servers()
    servers.record(PICK, address(4), is_known=True)
    servers.record(PICK, "10.9.9.9:8000", is_known=False)

    assert servers.num == {"chosen": 0, "fallback": 0, "other": 1, "unknown": 1}
    [warning] = servers.warnings()
    assert "2 requests" in warning
    assert "10.9.9.9:8000" in warning
    for cause in ("CORS", "weight", "blind", "modelNameOverride"):
        assert cause in warning
    servers.tick(now=0.0)
    assert servers.warnings() == [warning]
    servers.tick(now=WINDOW_S)
    assert servers.warnings() == []


def test_what_is_counted_of_late_is_that_of_one_window_to_two() -> None:
    count = 0
    lately = Lately(lambda: (count, 2 * count))
    grown = []
    for second in range(int(3 * WINDOW_S)):
        lately.tick(now=float(second))
        count += 1
        grown.append(lately.counts())

    assert grown[0] == (1, 2)
    assert max(grown) <= (2 * WINDOW_S, 4 * WINDOW_S)
    assert all(each[0] >= min(number + 1, WINDOW_S) for number, each in enumerate(grown))
