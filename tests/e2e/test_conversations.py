"""Conversations: back to the pod where their beginning is, and elsewhere where that pod is full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest

from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import SLOW, behind_envoy, own_pods, router_config
from tests.e2e.harness import Client, RouterProcess
from tests.waiting import eventually

NUM_CONVERSATIONS = 8
NUM_TURNS = 4
SESSION = "x-session"


def gateway(
    policy: str, pods: Sequence[RunningPod], http: aiohttp.ClientSession
) -> AbstractAsyncContextManager[tuple[RouterProcess, Client]]:
    config = router_config(
        pods,
        policy={"name": policy},
        request={"session_header": SESSION},
        server={"drain_timeout_s": 1},
    )
    return behind_envoy(config, http)


async def test_a_conversation_returns_to_the_pod_where_its_beginning_is(
    http: aiohttp.ClientSession,
) -> None:
    """Without a session header, though every pod has the base model. The beginnings of 28 KB are
    worth 0.3 s."""
    messages: dict[int, list[dict[str, Any]]] = {
        number: [{"role": "system", "content": f"{number} " + 29_500 * "x"}]
        for number in range(NUM_CONVERSATIONS)
    }
    served: dict[int, list[str]] = {each: [] for each in range(NUM_CONVERSATIONS)}
    async with own_pods(3) as pods, gateway("least_harm", pods, http) as (router, client):
        for _ in range(NUM_TURNS):
            await eventually(router.has_none_in_flight)
            for number, turns in messages.items():
                turns.append({"role": "user", "content": "And then?"})
                answer = await client.chat("base", messages=turns)
                assert answer.status == 200
                served[number].append(answer.served_by)
                turns.append({"role": "assistant", "content": "So it is."})

    assert served == {number: NUM_TURNS * names[:1] for number, names in served.items()}
    assert len({names[0] for names in served.values()}) > 1


@pytest.mark.parametrize("policy", ["least_harm", "founding"])
async def test_a_session_goes_elsewhere_while_its_pod_is_full_unless_the_policy_pins_it(
    http: aiohttp.ClientSession, policy: str
) -> None:
    """Its prompt is of 2 KB: shorter ones have no beginnings, and stay with every policy. Both pods
    have said how many slots they have: until an adapter has run there, they do not, and a slot
    costs nothing there."""
    session = {SESSION: "s"}
    messages = [{"role": "user", "content": 2_000 * "x"}]
    async with (
        own_pods(2, max_loras=1, profile=SLOW) as pods,
        gateway(policy, pods, http) as (router, client),
    ):
        for number in range(len(pods)):
            await client.chat(f"only-{number}")

        async def slots_are_known() -> bool:
            endpoints = (await router.admin("/debug/snapshot"))["endpoints"]
            return all(each["max_loras"] == 1 for each in endpoints)

        await eventually(slots_are_known)
        await eventually(router.has_none_in_flight)
        home = (await client.chat("shared", headers=session, messages=messages)).served_by
        await eventually(router.has_none_in_flight)
        assert (await client.chat("shared", headers=session, messages=messages)).served_by == home
        await eventually(router.has_none_in_flight)

        async with asyncio.TaskGroup() as tasks:
            own = home.replace("pod-", "only-")
            async with client.streaming(own, max_tokens=2000):
                before = requests_of(pods, home)
                again = tasks.create_task(client.chat("shared", headers=session, messages=messages))
                if policy == "founding":

                    async def has_come() -> bool:
                        return requests_of(pods, home) > before

                    await eventually(has_come)
                else:
                    await again

    is_home = again.result().served_by == home
    assert is_home == (policy == "founding")


def requests_of(pods: Sequence[RunningPod], name: str) -> int:
    [pod] = [each for each in pods if each.name == name]
    return pod.pod.runner.engine.counters.num_submitted
