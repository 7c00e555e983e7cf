"""The store of declared adapters, and who loads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from extproc.adapters.adapterstore import StoreRunner
from extproc.adapters.scope import Known
from extproc.adapters.stores.sqlite import Sqlite
from tests.waiting import beside, eventually


def keeping(
    path: Path | None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> StoreRunner:
    return StoreRunner(
        None if path is None else Sqlite(path, interval_s=0.1, clock=clock),
        lease_s=1.0,
        holder="r",
        on_stored=lambda _kept, _deleted: None,
        status=lambda _name: {},
        wait_until_ready=_never_ready,
        why_not=lambda _name: "",
        known=Known(lambda _source, _scope: False, lambda _name: False, lambda _name: None),
        clock=clock,
    )


async def test_a_router_loads_what_it_knows_while_the_store_can_name_no_leader(
    tmp_path: Path,
) -> None:
    """Otherwise no pod that restarts meanwhile gets its adapters back."""
    one = keeping(tmp_path / "missing" / "adapters.db")
    async with beside(one.run()):
        await eventually(lambda: one.leads())


async def test_a_router_that_slept_longer_than_its_lease_loads_nothing_before_it_has_it_again(
    tmp_path: Path,
) -> None:
    """It was stopped, or its machine was: by now another one may load."""
    now = 1000.0
    one = keeping(tmp_path / "adapters.db", clock=lambda: now)
    async with beside(one.run()):
        await eventually(lambda: one.leads())
        now += 1.5
        was_leading = one.leads()
        await eventually(lambda: one.leads())

    assert not was_leading


def test_without_a_store_any_router_may_load() -> None:
    assert keeping(None).leads()


async def _never_ready(_name: str, _timeout_s: float) -> bool:
    return False
