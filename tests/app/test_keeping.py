"""The store of declared adapters, and who loads."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from extproc.app.keeping import Keeping
from extproc.config.adapters import AdaptersConfig


async def test_a_router_loads_what_it_knows_while_the_store_can_name_no_leader(
    tmp_path: Path,
) -> None:
    """Otherwise no pod that restarts meanwhile gets its adapters back."""
    store = {"sqlite": {"file": tmp_path / "missing" / "adapters.db"}}
    keeping = Keeping(
        AdaptersConfig.model_validate({"store": store}),
        holder="r",
        on_stored=lambda _kept, _deleted: None,
        status=lambda _name: {},
        wait_until_ready=_never_ready,
        clock=time.monotonic,
    )
    task = asyncio.create_task(keeping.run())
    async with asyncio.timeout(30):
        while not keeping.is_leading:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _never_ready(_name: str, _timeout_s: float) -> bool:
    return False
