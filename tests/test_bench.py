"""The benchmarks can be started: nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    livepage,
    placement,
    run,
    soak,
)

BENCHMARKS = (
    abuse,
    adapterchaos,
    adapterload,
    adapters,
    decisions,
    fuzz_service,
    generator,
    hold,
    livepage,
    placement,
    run,
    soak,
)
MAINS = [module.main for module in BENCHMARKS]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_a_benchmark_tells_its_options(
    main: Callable[[Sequence[str] | None], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    assert "usage: " in capsys.readouterr().out
