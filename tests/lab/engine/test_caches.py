"""The adapter cache against an oracle that is written differently, and against vLLM's rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.engine.caches import AdapterCache, AdapterLoad

_ADAPTERS = st.sampled_from("abcdefgh")


@st.composite
def _sizes(draw: st.DrawFn) -> tuple[int, int]:
    max_loras = draw(st.integers(1, 4))
    return max_loras, draw(st.integers(max_loras, 7))


def _most_recent(uses: list[str], count: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reversed(uses)))[:count]


@given(_sizes(), st.lists(_ADAPTERS, max_size=60))
def test_caches_hold_the_most_recently_used_adapters(
    sizes: tuple[int, int], uses: list[str]
) -> None:
    """Oracle: with one order of use for both, each cache is a prefix of the recency order."""
    cache = AdapterCache(*sizes)
    for adapter in uses:
        cache.use(adapter)

    assert _most_recent(uses, sizes[0]) == cache.gpu
    assert _most_recent(uses, sizes[1]) == cache.cpu


@given(_sizes(), st.lists(_ADAPTERS, max_size=60))
def test_a_load_is_reported_exactly_when_an_adapter_was_not_there(
    sizes: tuple[int, int], uses: list[str]
) -> None:
    cache = AdapterCache(*sizes)
    for index, adapter in enumerate(uses):
        was_on_gpu = adapter in _most_recent(uses[:index], sizes[0])
        was_in_cpu = adapter in _most_recent(uses[:index], sizes[1])

        expected = None if was_on_gpu else AdapterLoad(adapter, is_from_disk=not was_in_cpu)
        assert expected == cache.use(adapter)


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(0, 1), (3, 2), (-1, -1)])
def test_sizes_that_vllm_refuses_are_refused(max_loras: int, max_cpu_loras: int) -> None:
    with pytest.raises(ValueError, match="max_loras"):
        AdapterCache(max_loras, max_cpu_loras)
