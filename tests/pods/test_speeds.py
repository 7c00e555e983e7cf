"""What prompts and loads cost, learned from first tokens."""

from __future__ import annotations

from itertools import count
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.costs import Costs, Load, Probe
from extproc.learned.evidence import Evidence
from extproc.learned.slopes import STEP_S, Level, Slope, drawn, fit, level, most, rate
from extproc.pods.pool import Pool, PoolSettings
from extproc.pods.serverflags import ServerFlags
from extproc.pods.speeds import (
    MAX_LOAD_S,
    MAX_RATIO,
    MIN_ALIKE,
    MIN_FIT_S,
    MIN_LOAD_S,
    NUM_OF_GROUP,
    NUM_SENT,
    UNSEEN_RATIO,
)
from tests.builders import address, endpoint, fill, pick, report, request
from tests.otherrouters import OtherRouter

GIVEN = Costs(prompt_s_per_byte=1e-5, cold_load_s=0.1, cached_load_s=0.01)
SETTINGS = PoolSettings(costs=GIVEN, max_loras=2, groups={"l4": ServerFlags(costs=GIVEN)})
BASE_S = 0.02
LATER_S = count(0.0, 1e7)


def pool(num: int = 2, settings: PoolSettings = SETTINGS) -> Pool:
    return fill(Pool(settings), *range(1, num + 1), adapters="abc", load=report(max_loras=2))


def costs(made: Pool, number: int = 1) -> Costs:
    return made.snapshot(now=0.0).endpoints[number - 1].costs


def hear(
    made: Pool,
    number: int,
    num_bytes: int,
    ttft_s: float,
    load: Load = Load.NONE,
    *,
    before_bytes: int = 0,
    is_behind: bool = False,
    sent_at_s: float | None = None,
) -> None:
    """Have an endpoint's first token; without a time long after all others."""
    pod = made.find(address(number))
    assert pod is not None
    told = Probe(num_bytes, load, before_bytes, is_behind)
    made.speeds.had_first_token(
        pod, told, next(LATER_S) if sent_at_s is None else sent_at_s, ttft_s
    )


def compute(
    made: Pool, s_per_byte: float, *numbers: int, num: int = 100, noise_s: float = 0.005
) -> None:
    """Let endpoints compute prompts of up to 10 kB; one in ten is a second late."""
    rng = Random(1)
    for _ in range(num):
        for number in numbers:
            num_bytes = rng.randrange(10_000)
            late_s = rng.uniform(-noise_s, noise_s) + (rng.random() < 0.1)
            hear(made, number, num_bytes, BASE_S + num_bytes * s_per_byte + late_s)


# --- the line ---------------------------------------------------------------------------------


@given(st.floats(1e-7, 1e-3), st.floats(-1, 1), st.lists(st.integers(0, 10**6), min_size=12))
def test_a_line_is_found_whatever_its_points(
    slope: float, base_s: float, places: list[int]
) -> None:
    places += [0] * len(places) + [10**6] * len(places)
    line = fit([(num_bytes, base_s + slope * num_bytes) for num_bytes in places])

    assert line is not None
    assert line.s_per_byte == pytest.approx(slope, rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(
    "points", [[], [(n, 1.0) for n in range(11)], [(7, 1.0 * n) for n in range(99)]]
)
def test_there_is_no_line_through_few_points_or_prompts_that_are_all_alike(
    points: list[tuple[int, float]],
) -> None:
    assert fit(points) is None


def test_a_sixth_of_the_points_may_be_anywhere() -> None:
    points = [(n, 0.02 + n * 1e-3) for n in range(100)] + [(99, 60.0)] * 15
    line = fit(points)

    assert line is not None
    assert line.s_per_byte == pytest.approx(1e-3, rel=0.02)


def test_the_error_is_about_that_of_repeated_trials() -> None:
    rng = Random(5)
    lines = []
    for _ in range(200):
        points = [(rng.randrange(1000), 0.0) for _ in range(48)]
        found = fit([(n, n * 1e-3 + rng.gauss(0, 0.2)) for n, _ in points])
        assert found is not None
        lines.append(found)
    errors = sorted(line.error_s_per_byte for line in lines)
    misses = sorted(abs(line.s_per_byte - 1e-3) for line in lines)

    assert 0.25 < misses[136] / errors[100] < 1  # two thirds are within one standard error


def test_a_slope_counts_as_far_as_it_is_sure() -> None:
    slopes = [drawn(1.0, 1.0, Slope(3.0, error)) for error in (0.0, 1.0, 1e9)]

    assert slopes == pytest.approx([3.0, 2.0, 1.0], rel=1e-5)
    assert drawn(1.0, 1.0, None, Slope(3.0, 1.0), Slope(5.0, 1.0)) == pytest.approx(3.0)
    assert drawn(1.0, 0.0, Slope(3.0, 0.0)) == 1.0


def test_the_rate_of_prompts_computed_one_after_the_other_is_as_sure_as_they_are_long() -> None:
    short, long = (rate([(size, size * 1e-3)] * 16) for size in (50, 50_000))

    assert short == pytest.approx(Slope(1e-3, STEP_S / 50))
    assert long == pytest.approx(Slope(1e-3, STEP_S / 50_000))
    assert rate([(1000, 1.0)] * 7) is None


def test_a_byte_costs_no_more_than_the_first_tokens_of_long_prompts_took() -> None:
    points = [(100, 0.05)] * 8 + [(10_000, 1.0)] * 4

    assert most(points) == pytest.approx(1e-4)
    assert most(points[:11]) == most([(0, 1.0)] * 99) == inf


# --- prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_the_cost_of_prompts_is_learned_whatever_is_configured(ratio: float) -> None:
    made = pool()
    compute(made, ratio * GIVEN.prompt_s_per_byte, 1, 2)

    for number in (1, 2):
        assert costs(made, number).prompt_s_per_byte == pytest.approx(ratio * 1e-5, rel=0.15)
        assert costs(made, number).cold_load_s == GIVEN.cold_load_s


def test_each_endpoint_has_its_own_and_a_new_one_what_its_group_has() -> None:
    made = pool()
    compute(made, 1e-5, 1)
    compute(made, 3e-5, 2)
    made.set_endpoints([endpoint(number) for number in (1, 2, 3)])
    slopes = [costs(made, number).prompt_s_per_byte for number in (1, 2, 3)]

    assert slopes[:2] == pytest.approx([1e-5, 3e-5], rel=0.2)
    assert slopes[0] < slopes[2] < slopes[1]


def hear_at_once(made: Pool, s_per_byte: float, at_s: float) -> None:
    """Let the first endpoint have many first tokens at one time."""
    for size in [1000, 5000, 20_000, 60_000] * (NUM_OF_GROUP // 4):
        ttft_s = BASE_S + size * s_per_byte
        hear(made, 1, size, ttft_s, sent_at_s=at_s - ttft_s)


def test_a_group_is_looked_at_a_few_times_a_second_however_many_first_tokens_come() -> None:
    made = pool()

    def new_costs(s_per_byte: float, since_s: float) -> float:
        hear_at_once(made, s_per_byte, since_s)
        made.set_endpoints([endpoint(1)])
        made.set_endpoints([endpoint(1), endpoint(2)])
        return costs(made, 2).prompt_s_per_byte

    newest_s = next(LATER_S)
    before = new_costs(2e-5, newest_s)

    assert new_costs(4e-5, newest_s + MIN_FIT_S / 2) == before
    assert new_costs(4e-5, newest_s + MIN_FIT_S) != before


def test_so_is_an_endpoint() -> None:
    made = pool()

    def own_costs(s_per_byte: float, since_s: float) -> float:
        hear_at_once(made, s_per_byte, since_s)
        return costs(made).prompt_s_per_byte

    newest_s = next(LATER_S)
    before = own_costs(2e-5, newest_s)

    assert own_costs(4e-5, newest_s + MIN_FIT_S / 2) == before
    assert own_costs(4e-5, newest_s + MIN_FIT_S) != before


def test_endpoints_that_are_alike_are_taken_to_be_alike() -> None:
    made, numbers = pool(8), range(1, 9)
    compute(made, 2e-5, *numbers, noise_s=0.1)
    slopes = [costs(made, number).prompt_s_per_byte for number in numbers]

    assert max(slopes) / min(slopes) < 1.1


@pytest.mark.parametrize("ttft_s", [BASE_S, 5.0])
def test_clients_of_one_endpoint_move_its_costs_within_bounds_and_hardly_those_of_others(
    ttft_s: float,
) -> None:
    """Sessions keep them there; a third of its first tokens is theirs, of the longest bodies."""
    made, numbers, rng = pool(8), range(1, 9), Random(1)
    for _ in range(200):
        for number in numbers:
            num_bytes = rng.randrange(10_000)
            hear(made, number, num_bytes, BASE_S + num_bytes * 1e-5 + rng.uniform(0, 0.02))
            if number == 1 and rng.random() < 0.5:
                hear(made, 1, rng.randrange(10_000, 20_000), ttft_s)
    slopes = [costs(made, number).prompt_s_per_byte for number in numbers]

    assert 1e-5 / MAX_RATIO <= slopes[0] <= 1e-5 * MAX_RATIO
    assert slopes[1:] == pytest.approx([1e-5] * 7, rel=0.2)


def test_short_prompts_that_are_all_alike_teach_nothing() -> None:
    made = pool()
    for _ in range(100):
        hear(made, 1, 400, 0.5)

    assert costs(made) == GIVEN


@pytest.mark.parametrize("seed", range(40))
def test_prompts_of_one_length_leave_their_cost_as_configured_however_late_some_are(
    seed: int,
) -> None:
    """They differ by the bytes of a name. One in ten first tokens is late by far."""
    made, rng, sent = pool(), Random(seed), [0, 0]
    for number, at_s in zip([1, 2] * 150, count(1.0, 0.03), strict=False):
        size, late_s = rng.choice([500, 504, 508]), 0.3 * (rng.random() < 0.1)
        hear(
            made,
            number,
            size,
            BASE_S + rng.expovariate(20.0) + late_s,
            before_bytes=sent[number - 1],
            is_behind=rng.random() < 0.3,
            sent_at_s=at_s,
        )
        sent[number - 1] += size

    assert [costs(made, number).prompt_s_per_byte for number in (1, 2)] == [1e-5, 1e-5]


@pytest.mark.parametrize(("ratio", "learned"), [(1000, MAX_RATIO), (0.001, 1 / MAX_RATIO)])
def test_what_is_learned_of_prompts_has_bounds(ratio: float, learned: float) -> None:
    made = pool()
    compute(made, ratio * GIVEN.prompt_s_per_byte, 1)

    assert costs(made).prompt_s_per_byte == pytest.approx(
        learned * GIVEN.prompt_s_per_byte, rel=0.5
    )
    assert 1 / MAX_RATIO <= costs(made).prompt_s_per_byte / GIVEN.prompt_s_per_byte <= MAX_RATIO


def test_what_was_long_ago_is_forgotten() -> None:
    made = pool()
    compute(made, 1e-5, 1, num=NUM_OF_GROUP)
    compute(made, 4e-5, 1, num=NUM_OF_GROUP)

    assert costs(made).prompt_s_per_byte == pytest.approx(4e-5, rel=0.15)


def test_another_configuration_holds_at_once_where_nothing_was_learned() -> None:
    made = pool()
    compute(made, 3e-5, 1)
    dearer = Costs(prompt_s_per_byte=1e-4, cold_load_s=1.0)
    made.configure(replace(SETTINGS, costs=dearer))

    assert costs(made, 1).prompt_s_per_byte == pytest.approx(3e-5, rel=0.15)
    assert costs(made, 1).cold_load_s == 1.0


def test_groups_learn_for_themselves() -> None:
    made = pool()
    compute(made, 3e-5, 1, 2)
    made.set_endpoints([replace(endpoint(1), group="l4"), endpoint(2)])
    moved = costs(made, 1)
    compute(made, 1e-4, 1)

    assert moved == GIVEN
    assert costs(made, 1).prompt_s_per_byte == pytest.approx(8e-5, rel=0.15)
    assert costs(made, 2).prompt_s_per_byte == pytest.approx(3e-5, rel=0.15)


def test_what_is_heard_of_an_endpoint_that_left_teaches_nothing() -> None:
    made = pool()
    gone = made.find(address(2))
    assert gone is not None
    made.set_endpoints([endpoint(1)])
    for n in range(100):
        made.speeds.had_first_token(gone, Probe(n, Load.NONE), 0.0, 1.0 * n)
    assert costs(made) == GIVEN
    made.set_endpoints([])
    made.speeds.had_first_token(gone, Probe(1, Load.NONE), 0.0, 1.0)

    assert not made.snapshot(now=0.0).endpoints


def serve(made: Pool, s_per_byte: float, *, num: int = 64, size: int = 20_000) -> None:
    """Let an endpoint compute prompts that are all alike, with always one more waiting there."""
    work_s = size * s_per_byte
    for number in range(num):
        sent_at_s = max(0.0, number - 1.5) * work_s
        ttft_s = BASE_S + (number + 1) * work_s - sent_at_s
        hear(made, 1, size, ttft_s, before_bytes=number * size, sent_at_s=sent_at_s)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_prompts_that_are_all_alike_tell_what_they_cost_where_one_waits_for_the_other(
    ratio: float,
) -> None:
    made = pool()
    serve(made, ratio * 1e-5)

    assert costs(made).prompt_s_per_byte == pytest.approx(ratio * 1e-5, rel=0.5)


def test_it_takes_few_that_wait_to_show_it() -> None:
    made = pool()
    serve(made, 2e-5, num=20)

    assert costs(made).prompt_s_per_byte == pytest.approx(2e-5, rel=0.2)


def test_what_was_ahead_and_is_unknown_makes_no_prompt_dearer() -> None:
    """First tokens of one response a minute, behind prompts whose first tokens are not known."""
    made = pool()
    for num_bytes in range(0, 200_000, 2_000):
        hear(made, 1, num_bytes, BASE_S + 1.0 + num_bytes * 5e-5, is_behind=True)

    assert costs(made) == GIVEN


@pytest.mark.parametrize("is_behind", [True, False])
def test_no_prompt_is_taken_to_cost_more_than_its_first_token_took(is_behind: bool) -> None:
    made = pool()
    for _ in range(16):
        hear(made, 1, 100_000, 0.25, is_behind=is_behind)

    assert costs(made).prompt_s_per_byte == pytest.approx(2.5e-6)


def test_the_latest_first_tokens_are_compared_and_older_ones_forgotten() -> None:
    made = pool()
    pod = made.find(address(1))
    for number in range(NUM_SENT + 8):
        hear(made, 1, 1000, 10.0 + number, before_bytes=1000 * number, sent_at_s=0.0)

    assert pod is not None
    assert len(made.speeds._groups[""].endpoints[pod]._sent) == NUM_SENT


# --- loads ------------------------------------------------------------------------------------


def test_a_level_is_a_median_and_bounds_that_some_late_values_do_not_move() -> None:
    assert level([]) == Level(-inf, 0.0, inf)
    assert level([3.0, 1.0, 2.0, 9.0]) == Level(-inf, 2.5, inf)
    assert level([1.0] * 12 + [9.0] * 4) == Level(1.0, 1.0, 9.0)
    assert level([1.0] * 13 + [9.0] * 3) == Level(1.0, 1.0, 1.0)


def load(made: Pool, load_s: float, kind: Load = Load.COLD, *, num: int = 16) -> None:
    """Let the first endpoint load adapters, and compute some prompts without a load after that."""
    for _ in range(num):
        hear(made, 1, 1000, BASE_S + 0.01 + load_s, kind)
    compute(made, 1e-5, 1, num=16)


@pytest.mark.parametrize("load_s", [0.03, 0.4, 3.0])
def test_the_seconds_of_loads_are_learned(load_s: float) -> None:
    made = pool()
    compute(made, 1e-5, 1, 2)
    load(made, load_s)
    load(made, load_s / 2, Load.CACHED)
    compute(made, 1e-5, 2, num=16)

    for number in (1, 2):
        learned = costs(made, number)
        assert learned.cold_load_s == pytest.approx(load_s, abs=0.01)
        assert learned.cached_load_s == pytest.approx(load_s / 2, abs=0.01)
        assert learned.known_cold_load_s == learned.cold_load_s


@given(st.floats(0.02, 2.0), st.floats(0.0, 0.5), st.integers(0, 2**32))
def test_loads_are_learned_behind_other_requests_by_first_tokens_without_one_there(
    load_s: float, wait_s: float, seed: int
) -> None:
    made, rng = pool(), Random(seed)
    for number in range(48):
        kind = Load.COLD if number % 2 else Load.NONE
        ahead_s = wait_s * rng.uniform(0.9, 1.1)
        hear(made, 1, 100, BASE_S, Load.NONE)
        own_s = load_s * (kind is Load.COLD)
        hear(made, 1, 100, BASE_S + ahead_s + own_s, kind, is_behind=True)
    known_s = costs(made).known_cold_load_s

    assert known_s is None or load_s / 2 < known_s < 2 * load_s
    assert known_s is not None or load_s < 2 * UNSEEN_RATIO * (BASE_S + 2 * wait_s)


def test_a_load_too_short_to_be_seen_is_unknown_and_as_configured_if_that_may_be_true() -> None:
    made = pool()
    compute(made, 1e-5, 1, noise_s=0.0)
    load(made, 0.002)
    load(made, 0.002, Load.CACHED)

    assert costs(made).known_cold_load_s is costs(made).known_cached_load_s is None
    assert costs(made).cold_load_s == pytest.approx(0.002, abs=0.001)  # 0.1 cannot be true
    assert costs(made).cached_load_s == GIVEN.cached_load_s  # which may be true


def test_a_few_loads_change_nothing() -> None:
    made = pool()
    compute(made, 1e-5, 1)
    load(made, 9.0, num=4)

    assert costs(made).cold_load_s == GIVEN.cold_load_s
    assert costs(made).known_cold_load_s is None


def test_a_quarter_of_loads_may_be_anything() -> None:
    made = pool()
    compute(made, 1e-5, 1)
    load(made, 0.4, num=40)
    for odd_s in (-1.0, 60.0):
        load(made, odd_s, num=8)

    assert costs(made).known_cold_load_s == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize(("ttft_s", "learned_s"), [(0.0, MIN_LOAD_S), (1e6, MAX_LOAD_S)])
def test_what_is_learned_of_loads_has_bounds(ttft_s: float, learned_s: float) -> None:
    made = pool()
    compute(made, 1e-5, 1, noise_s=0.0)
    for _ in range(100):
        hear(made, 1, 100_000 if not ttft_s else 1000, ttft_s, Load.COLD)
    compute(made, 1e-5, 1, num=16)

    assert costs(made).cold_load_s == learned_s


def test_loads_teach_nothing_before_it_is_known_what_the_rest_takes() -> None:
    made = pool()
    compute(made, 1e-5, 1, num=MIN_ALIKE - 1)
    load(made, 9.0, num=100)

    assert costs(made).cold_load_s == GIVEN.cold_load_s


def small_caches(group: str, cached_load_s: float) -> Pool:
    """A pool whose loads from a CPU cache of 8 take so long, and twice 0.1 s from disk."""
    flags = ServerFlags(max_cpu_loras=8, costs=GIVEN)
    settings = PoolSettings(max_cpu_loras=8, costs=GIVEN, max_loras=2, groups={"l4": flags})
    made = Pool(settings)
    made.set_endpoints([replace(endpoint(1), group=group)])
    compute(made, 1e-5, 1)
    load(made, 0.2)
    load(made, cached_load_s, Load.CACHED)
    return made


@pytest.mark.parametrize(
    ("group", "field"), [("", "pods.max_cpu_loras"), ("l4", "pods.groups.l4.max_cpu_loras")]
)
def test_caches_whose_loads_take_as_long_as_from_disk_are_said_once(group: str, field: str) -> None:
    made = small_caches(group, 0.15)
    (said,) = [*made.speeds.take_news(), *made.speeds.take_news()]

    assert f"ms to load, as from disk. Is {field} (8) more than the pods' --max-cpu-loras" in said


def test_another_size_that_is_too_large_as_well_is_said_too() -> None:
    made = small_caches("", 0.15)
    assert len([*made.speeds.take_news()]) == 1
    made.configure(PoolSettings(max_cpu_loras=6, costs=GIVEN, max_loras=2))

    assert "pods.max_cpu_loras (6)" in next(made.speeds.take_news())


def test_nothing_is_said_of_caches_that_are_fast_or_unknown_or_not_configured() -> None:
    fast, few, unset = small_caches("", 0.05), pool(settings=PoolSettings(max_cpu_loras=8)), pool()
    compute(unset, 1e-5, 1)
    load(unset, 0.2, Load.CACHED)
    empty = Pool(PoolSettings(max_cpu_loras=8, groups={"l4": ServerFlags()}))
    empty.set_endpoints([])

    assert [list(made.speeds.take_news()) for made in (fast, few, unset, empty)] == [[]] * 4


# --- what tells -------------------------------------------------------------------------------


def probe(made: Pool, adapter: str | None, *, now: float = 1.0) -> Probe | None:
    """What the pool expects to learn from a request of 100 bytes."""
    info = request(adapter, body_bytes=100)
    made.flights.start(chosen := pick("r-probe", 1, info=info), now=now)
    flight = made.flights.finish(chosen.id, now=now)
    assert flight is not None
    return flight.probe


def test_a_load_is_where_residency_has_the_adapter() -> None:
    settings = replace(SETTINGS, max_loras=1, max_cpu_loras=2)
    made = fill(Pool(settings), 1, adapters="abc", load=report(max_loras=1))
    made.snapshot(now=0.0)  # b and c were loaded last

    assert probe(made, None) == Probe(100, Load.NONE)
    assert probe(made, "c", now=2.0) == Probe(100, Load.NONE, 100)
    assert probe(made, "b", now=3.0) == Probe(100, Load.CACHED, 200)
    assert probe(made, "a", now=4.0) == Probe(100, Load.COLD, 300)


def test_what_was_cached_of_a_prompt_does_not_count() -> None:
    made = pool()
    info = replace(request(None, body_bytes=100), cached_bytes={address(1): 90})
    made.flights.start(pick("r-1", 1, info=info), now=1.0)

    assert [flight.probe for flight in made.flights] == [Probe(10, Load.NONE)]


def test_a_body_that_is_longer_than_the_context_tells_nothing_of_text() -> None:
    made = pool()
    info = request(None, body_bytes=1_000_000, context_bytes=32_000)
    made.flights.start(pick("r-1", 1, info=info), now=1.0)

    assert [flight.probe for flight in made.flights] == [None]


def test_a_probe_tells_what_was_sent_before_and_whether_that_is_ahead() -> None:
    made = pool()
    made.flights.start(pick("r-1", 1, info=request(None, body_bytes=200_000)), now=1.0)

    assert probe(made, None, now=2.9) == Probe(100, Load.NONE, 200_000, is_behind=True)
    assert probe(made, None, now=3.1) == Probe(100, Load.NONE, 200_100)


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [("a", Probe(100, Load.NONE)), ("c", None), (None, Probe(100, Load.NONE))],
)
def test_nothing_tells_where_it_may_have_waited_for_a_slot(
    adapter: str | None, expected: Probe | None
) -> None:
    made = pool()
    made.flights.start(pick("r-1", 1, info=request("a")), now=1.0)
    OtherRouter(made, now=1.0).start(adapter="b", now=1.0)

    assert probe(made, adapter, now=9.0) == expected


def test_adapters_tell_nothing_where_slots_are_unknown() -> None:
    made = Pool(PoolSettings(costs=GIVEN))
    made.set_endpoints([endpoint(1)])

    assert probe(made, "a") is None
    assert probe(made, None, now=9.0) == Probe(100, Load.NONE, 100)


def test_a_view_tells_the_mean_time_of_responses_there() -> None:
    made = pool()
    before = made.snapshot(now=0.0).endpoints[0].response_s
    for number in range(2):
        made.flights.start(chosen := pick(f"r-{number}", 1, info=request("a")), now=1.0)
        made.flights.finish(chosen.id, now=3.0, verdict=Evidence.SERVED)

    first, second = made.snapshot(now=3.0).endpoints
    assert (before, first.response_s, second.response_s) == (None, 2.0, None)
