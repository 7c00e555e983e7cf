"""What a report leaves as it was is kept, and is what would be concluded afresh."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from extproc.pods.residency import NO_ADAPTER, THIS_ADAPTER, Change, Residency
from extproc.types import LoadReport

NAMES = ("a", "b", "c", "d", "e", "f")

_ACTIVE = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), _ACTIVE, _ACTIVE, st.sampled_from([None, 1, 2, 3])),
        st.tuples(st.just("start"), st.sampled_from(NAMES)),
        st.tuples(st.just("finish"), st.sampled_from(NAMES), st.booleans(), st.booleans()),
        st.tuples(st.just("stated"), _ACTIVE, _ACTIVE | st.none()),
        st.tuples(st.just("registered"), _ACTIVE),
        st.tuples(st.just("resize"), st.sampled_from([None, 2, 4])),
    ),
    max_size=40,
)


def _apply(residency: Residency, event: tuple[object, ...], now: float) -> Change:
    match event:
        case ("report", list() as active, list() as ended, slots):
            log = [(name, 1e9 + now) for name in active]
            log += [(name, 1e9 + now - 0.5) for name in ended if name not in active]
            residency.reported(
                LoadReport(
                    max_loras=slots if isinstance(slots, int) else None,
                    active_adapters=frozenset(active),
                    adapter_log=tuple(log),
                ),
                now=now,
            )
        case ("start", str() as name):
            return residency.picked(name)
        case ("finish", str() as name, bool() as has_run, bool() as is_late):
            at_s = now - (5.0 if is_late else 0.25)
            if name not in residency.in_flight:
                return THIS_ADAPTER  # nothing ends that has not begun
            return residency.ended(name, 1, has_run, at_s)
        case ("stated", list() as gpu, cpu):
            residency.reported(
                LoadReport(
                    max_loras=2,
                    gpu_adapters=frozenset(gpu),
                    cpu_adapters=frozenset(cpu) if isinstance(cpu, list) else None,
                ),
                now=now,
            )
        case ("registered", list() as names):
            residency.listed(names, now=now)
        case ("resize", size):
            places = size if isinstance(size, int) else None
            residency.configure(max_loras=2, max_cpu_loras=places)
    return THIS_ADAPTER


# Another adapter is touched; adapters are evicted; too many are the oldest, then one less; slots
# change; one of several requests of an adapter that does not hold a slot ends; one ended before
# another was used; one begins beside others', and ends; and one that others run, too.
@example([("report", [], [], None), ("report", [], ["a"], None)], None)
@example(
    [
        *(("registered", []), ("registered", ["a"])),
        *(("report", ["b", "c"], [], None), ("report", ["b", "c"], [], None)),
    ],
    None,
)
@example([("report", [], ["a", "b", "c", "d"], None), ("report", [], ["a", "b"], None)], None)
@example([("registered", ["a", "b"]), ("report", [], [], 1)], None)
@example(
    [
        *(("start", "a"), ("start", "a")),
        *(("report", ["a", "b", "c", "d"], [], None), ("finish", "a", True, False)),
    ],
    4,
)
@example(
    [("start", "c"), ("report", ["a"], [], None), ("stated", [], []), ("finish", "c", True, True)],
    None,
)
@example([("report", ["d", "e"], [], 3), ("start", "d")], None)
@example([("report", ["a"], ["c"], 3), ("start", "a"), ("start", "b")], 4)
@example(
    [
        *(("report", ["a"], ["c"], 3), ("start", "a"), ("start", "b")),
        ("finish", "b", True, False),
    ],
    4,
)
@given(_EVENTS, st.sampled_from([None, 2, 4]))
def test_what_is_kept_is_what_would_be_concluded_afresh(
    events: list[tuple[object, ...]], cached: int | None
) -> None:
    """After each event, also where everything is trimmed each time; and where a request is said to
    change nothing, the same adapters are resident."""
    kept, afresh = (Residency(max_loras=2, max_cpu_loras=cached) for _ in range(2))
    for number, event in enumerate(events):
        afresh._num_kept = -1
        before = kept.arranged
        _apply(afresh, event, float(number))
        change = _apply(kept, event, float(number))
        afresh._ordered = None

        if change == NO_ADAPTER:
            assert [*map(set, kept.arranged)] == [*map(set, before)]
        assert kept.gpu_adapters == afresh.gpu_adapters
        assert kept.cpu_adapters == afresh.cpu_adapters
        assert kept._order() == afresh._order()


def test_a_report_of_the_same_adapters_keeps_the_conclusions() -> None:
    residency = Residency(max_loras=2, max_cpu_loras=4)
    residency.listed(NAMES, now=0.0)
    residency.picked("a")
    for now in (1.0, 2.0):
        _apply(residency, ("report", ["a"], [], 2), now)
    before = residency.gpu_adapters
    _apply(residency, ("report", ["a"], [], 2), 3.0)

    assert residency.gpu_adapters is before
