"""The store of declared adapters, and who loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from extproc.config.adapters import AdaptersConfig
from extproc.service.adapterstore import Keeping
from tests.waiting import eventually


def keeping(
    path: Path | None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Keeping:
    store = {"store": {"sqlite": {"file": path}}, "lease_s": 1.0} if path else {}
    return Keeping(
        AdaptersConfig.model_validate(store),
        holder="r",
        on_stored=lambda _kept, _deleted: None,
        status=lambda _name: {},
        wait_until_ready=_never_ready,
        why_not=lambda _name: "",
        clock=clock,
    )


@asynccontextmanager
async def running(one: Keeping) -> AsyncIterator[Keeping]:
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_router_loads_what_it_knows_while_the_store_can_name_no_leader(
    tmp_path: Path,
) -> None:
    """Otherwise no pod that restarts meanwhile gets its adapters back."""
    async with running(keeping(tmp_path / "missing" / "adapters.db")) as one:
        await eventually(lambda: one.leads())


async def test_a_router_that_slept_longer_than_its_lease_loads_nothing_before_it_has_it_again(
    tmp_path: Path,
) -> None:
    """It was stopped, or its machine was: by now another one may load."""
    now = 1000.0
    async with running(keeping(tmp_path / "adapters.db", clock=lambda: now)) as one:
        await eventually(lambda: one.leads())
        now += 1.5
        was_leading = one.leads()
        await eventually(lambda: one.leads())

    assert not was_leading


def test_without_a_store_any_router_may_load() -> None:
    assert keeping(None).leads()


async def _never_ready(_name: str, _timeout_s: float) -> bool:
    return False
