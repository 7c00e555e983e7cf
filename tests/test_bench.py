"""The benchmarks can be started: nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import (
    abuse,
    adapterchaos,
    adapterload,
    adapters,
    decisions,
    fuzz_service,
    generator,
    hold,
    lists,
    rewrite,
    run,
    soak,
    vllm_serve,
)
from extproc.request.messages import BodyMode

BENCHMARKS = (
    abuse,
    adapterchaos,
    adapterload,
    adapters,
    decisions,
    fuzz_service,
    generator,
    hold,
    lists,
    rewrite,
    run,
    soak,
    vllm_serve,
)
ROOT = Path(__file__).parents[1]
MAINS = [module.main for module in BENCHMARKS]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_a_benchmark_tells_its_options(
    main: Callable[[Sequence[str] | None], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_the_bench_of_rewriting_handles_requests() -> None:
    """Its dispatcher is one of its own, so that only a request shows what it lacks."""
    rewrite.request_us((), rewrite.BODY_BYTES[0], BodyMode.BUFFERED)()


def test_the_page_shows_the_newest_result_of_vllms_client() -> None:
    newest = max((ROOT / "bench" / "results").glob("vllm-serve-*.json"))

    assert vllm_serve.render_page(newest) in (ROOT / "docs" / "loadtest.md").read_text()
