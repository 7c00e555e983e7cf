"""The fuzz of the whole service: it attacks as said, and judges what honest clients saw."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bench.figures import parse_counters
from bench.fuzz_service import unbalanced
from bench.fuzzattack import SIDES, choices
from bench.fuzzfield import HONEST, SHAKY, SINK, Budget
from bench.fuzzhonest import OK, Asked, judge, summarise
from bench.fuzzpods import (
    PODS,
    SHAKY_PODS,
    Answer,
    Visit,
    hostile_pods,
    resets,
    takes_all,
)
from bench.fuzzreport import Phase, p99_ratios


def test_every_kind_has_a_name_of_its_own_and_may_be_chosen_alone() -> None:
    names = {name for name, _ in choices(())}

    assert len(names) == sum(map(len, SIDES.values()))
    assert {name for name, _ in choices(["client/leaves"])} == {"client/leaves"}
    with pytest.raises(ValueError, match="client/nobody"):
        choices(["client/nobody"])


@pytest.mark.parametrize(
    ("status", "body", "is_streamed", "cause"),
    [
        (200, b'{"choices": []}', False, OK),
        (200, b"data: {}\n\ndata: [DONE]\n\n", True, OK),
        (200, b"data: {}\n\n", True, "cut answer"),
        (200, b"", False, "cut answer"),
        (503, b'{"error": {"code": "no_endpoints"}}', False, "503 no_endpoints"),
        (500, b'{"error": "no"}', False, "500 without a code"),
        (500, b"upstream connect error", False, "500 without a code"),
    ],
)
def test_an_answer_is_whole_or_has_a_cause(
    status: int, body: bytes, is_streamed: bool, cause: str
) -> None:
    assert judge(status, body, is_streamed=is_streamed) == cause


def test_a_summary_counts_failures_by_cause_in_its_phase_alone() -> None:
    asked = [Asked("quiet 1", 0.1, OK), Asked("quiet 1", 9.0, "timeout"), Asked("x", 1.0, "y")]

    summary = summarise(asked, "quiet 1")

    assert (summary.requests, summary.failures) == (2, {"timeout": 1})
    assert summary.p99_ms == pytest.approx(9000)


def _phase(name: str, seconds: float) -> Phase:
    summary = summarise([Asked(name, seconds, OK)], name)
    return Phase(name, 1.0, summary, summary, {}, {}, 0.0, 0, None)


def test_each_attack_is_compared_with_the_quiet_before_it() -> None:
    seconds = {"quiet 1": 0.1, "attack 1": 0.2, "settling 1": 9.0, "quiet 2": 0.4, "attack 2": 0.2}

    ratios = p99_ratios([_phase(name, each) for name, each in seconds.items()])

    assert ratios == pytest.approx([2.0, 0.5])


def test_counts_that_do_not_add_up_are_found() -> None:
    page = (
        "extproc_picks_in_flight 0\nextproc_streams_active 0\n"
        "extproc_picks_total 3\nextproc_completions_total 3\n"
    )

    assert unbalanced(parse_counters(page)) == []
    assert len(unbalanced(parse_counters(page.replace("active 0", "active 2")))) == 1
    assert len(unbalanced(parse_counters(page.replace("picks_total 3", "picks_total 4")))) == 1


async def test_a_budget_holds_the_loud_back_and_lets_the_slow_pass() -> None:
    budget = Budget(bytes_per_s=1e5)
    await budget.spend(30_000)  # what comes at once
    loud = asyncio.create_task(budget.spend(1_000_000))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await budget.spend(1)

    assert not loud.done()
    assert budget.num_bytes == 1_030_001
    loud.cancel()


class _Written(asyncio.StreamWriter):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def __del__(self, *_: object) -> None:
        pass

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.data += data

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


async def _listed(answer: Answer) -> bytes:
    """What a pod says when it is asked for its models, before it waits for anything."""
    writer = _Written()
    visit = Visit("mine", "/v1/models", Random(3), writer)
    try:
        async with asyncio.timeout(0):
            await answer(visit)
    except TimeoutError:
        pass
    return writer.data


async def test_no_hostile_pod_lists_an_honest_adapter_and_the_shaky_ones_list_theirs() -> None:
    """Else an honest request would be routed to it by right."""
    hostile = [await _listed(answer) for answer in PODS if answer is not resets]
    shaky = [await _listed(answer) for answer in SHAKY_PODS]

    assert not any(name.encode() in said for name in (*HONEST, *SHAKY, SINK) for said in hostile)
    assert not any(name.encode() in said for name in HONEST for said in shaky)
    assert all(name.encode() in said for name in SHAKY for said in shaky)
    assert b'"sink"' in await _listed(takes_all)


async def test_one_pod_of_each_kind_listens_and_one_refuses() -> None:
    async with hostile_pods(1, seed=3) as pods:
        for pod in pods[:-1]:
            _, writer = await asyncio.open_connection(*pod.address.split(":"))
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*pods[-1].address.split(":"))

    assert len(pods) == len(PODS) + len(SHAKY_PODS) + 2
