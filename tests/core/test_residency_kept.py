"""What a report leaves as it was is kept, and is what would be concluded afresh."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.core.residency import Residency
from extproc.core.types import LoadReport

NAMES = ("a", "b", "c", "d", "e", "f")

_ACTIVE = st.lists(st.sampled_from(NAMES), max_size=4, unique=True)
_EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), _ACTIVE, _ACTIVE, st.sampled_from([None, 1, 2, 3])),
        st.tuples(st.just("start"), st.sampled_from(NAMES)),
        st.tuples(st.just("finish"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("registered"), _ACTIVE),
        st.tuples(st.just("resize"), st.sampled_from([None, 2, 4])),
    ),
    max_size=40,
)


def _apply(residency: Residency, event: tuple[object, ...], now: float) -> None:
    match event:
        case ("report", list() as active, list() as ended, slots):
            log = [(name, 1e9 + now) for name in active]
            log += [(name, 1e9 + now - 0.5) for name in ended if name not in active]
            residency.record_report(
                LoadReport(
                    max_loras=slots if isinstance(slots, int) else None,
                    active_adapters=frozenset(active),
                    adapter_log=tuple(log),
                ),
                taken_at_s=now,
            )
        case ("start", str() as name):
            residency.start(name)
        case ("finish", str() as name, bool() as has_run):
            residency.finish(name, now=now - 0.25, has_run=has_run)
        case ("registered", list() as names):
            residency.record_registered(names, now=now)
        case ("resize", size):
            residency.resize(size if isinstance(size, int) else None)


@given(_EVENTS, st.sampled_from([None, 2, 4]))
def test_what_is_kept_is_what_would_be_concluded_afresh(
    events: list[tuple[object, ...]], cached: int | None
) -> None:
    read_often, read_at_the_end = (Residency(max_loras=2, max_cpu_loras=cached) for _ in range(2))
    for number, event in enumerate(events):
        _apply(read_often, event, float(number))
        _apply(read_at_the_end, event, float(number))
        assert set(read_often.gpu_adapters) <= set(NAMES)  # from here on there is something to keep

    assert read_often.gpu_adapters == read_at_the_end.gpu_adapters
    assert read_often.cpu_adapters == read_at_the_end.cpu_adapters
    assert [read_often.place(name) for name in NAMES] == [
        read_at_the_end.place(name) for name in NAMES
    ]


def test_a_report_of_the_same_adapters_keeps_the_conclusions() -> None:
    residency = Residency(max_loras=2, max_cpu_loras=4)
    residency.record_registered(NAMES, now=0.0)
    residency.start("a")
    for now in (1.0, 2.0):
        _apply(residency, ("report", ["a"], [], 2), now)
    before = residency.gpu_adapters
    _apply(residency, ("report", ["a"], [], 2), 3.0)

    assert residency.gpu_adapters is before
