"""Load tests against a real vLLM: every answer is timed, and counted to its adapter."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.workload.exchange import RequestForm, RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.synthetic import zipf
from tests.lab.lab import load_records, write_trace
from tests.vllm.server import ADAPTERS, BASE_MODEL, ROOT, VllmServer

NUM_ADAPTERS = 4
"""Twice as many as run at a time."""
SLO = Slo(ttft_s=20.0, tpot_s=5.0)
"""Objectives that a busy machine attains, too."""


@pytest.fixture(scope="module")
def workload() -> Workload:
    """A dozen requests a second for some seconds, Zipf's law over the rig's adapters."""
    made = zipf(
        "small",
        num_adapters=NUM_ADAPTERS,
        exponent=1.0,
        rate_rps=12.0,
        duration_s=4.0,
        seed=5,
        lengths=lambda rng: (rng.randint(8, 40), rng.randint(4, 16)),
        ranks=(8,),
    )
    names = dict(zip(sorted(made.adapters), ADAPTERS, strict=False))
    arrivals = tuple(replace(each, adapter=names[each.adapter or ""]) for each in made.arrivals)
    return replace(made, arrivals=arrivals, adapters=dict.fromkeys(names.values(), 8))


def check_records(workload: Workload, records: Sequence[RequestRecord]) -> None:
    """Check that every request got what it asked for, all of it in time."""
    by_index = {record.index: record for record in records}
    assert sorted(by_index) == list(range(len(workload.arrivals)))
    for index, arrival in enumerate(workload.arrivals):
        record = by_index[index]
        assert (record.error, record.status) == ("", 200), record
        assert record.adapter == arrival.adapter
        assert record.num_tokens == arrival.output_tokens
        assert record.ttft_s is not None
        assert 0 < record.ttft_s <= record.ended_s - record.sent_s
        # Tokens that wait to be sent come in one piece, and the last one may be without text.
        assert len(record.gaps_s) < record.num_tokens
        assert SLO.is_met(record)
    assert any(record.gaps_s for record in records)
    assert len({record.adapter for record in records}) == NUM_ADAPTERS


async def test_replay_times_and_counts_every_response(
    vllm_server: VllmServer, workload: Workload
) -> None:
    records: list[RequestRecord] = []
    form = RequestForm(base_model=BASE_MODEL, extra=(("ignore_eos", True),))

    await replay(workload, ReplaySettings(vllm_server.url, form), records.append)

    check_records(workload, records)


async def test_locust_times_and_counts_every_response(
    vllm_server: VllmServer, workload: Workload, tmp_path: Path
) -> None:
    sent, kept = write_trace(tmp_path, workload), tmp_path / "records"
    options = {
        "--host": vllm_server.url,
        "--workload": sent,
        "--adapter-names": "as-is",
        "--model": BASE_MODEL,
        "--slo-ttft": SLO.ttft_s,
        "--slo-tpot": SLO.tpot_s,
        "--records": kept,
    }
    command = [sys.executable, "-m", "locust", "-f", ROOT / "loadtest" / "locustfile.py"]
    command += ["--headless", "--ignore-eos", *(part for pair in options.items() for part in pair)]

    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    shown = (await asyncio.wait_for(process.communicate(), timeout=120))[0].decode()

    assert process.returncode == 0, shown[-3000:]
    check_records(workload, load_records(kept))
    num = len(workload.arrivals)
    assert f"served well: {num} of {num} requests" in shown
