"""Pods by label selector, from the real API server and through the faulty proxy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from extproc.discovery.kubernetes.kubewatch import WatchTimes
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.faultyproxy import ALL, NONE, Faults, FaultyProxy
from tests.kubernetes.following import Followed, Truth, following
from tests.waiting import eventually

NUM_PODS = 500
NUM_CHANGES = 1000
NUM_WRITERS = 6
NUM_ROUNDS = 10


@dataclass
class PodState:
    """The true state of a pod."""

    name: str
    ip: str = ""
    is_ready: bool = False
    is_ours: bool = True
    is_terminating: bool = False
    has_ended: bool = False
    exists: bool = False


class Writer:
    """Creates pods, changes them at random, and keeps their true state."""

    def __init__(self, cluster: Cluster, numbers: range, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._num_addresses = 0
        self._base = numbers.start
        self.pods = [PodState(f"pod-{number}") for number in numbers]

    def truth(self) -> Truth:
        return {
            f"{pod.ip}:8000": pod.is_ready and not pod.is_terminating
            for pod in self.pods
            if pod.exists and pod.is_ours and pod.ip and not pod.has_ended
        }

    async def create_all(self) -> None:
        for pod in self.pods:
            await self._create(pod)
            await self._set(pod, is_ready=True)

    async def change(self, times: int) -> None:
        for _ in range(times):
            pod = self._rng.choice(self.pods)
            if pod.exists:
                await self._rng.choice(
                    (self._toggle, self._move, self._relabel, self._delete, self._end, self._kill)
                )(pod)
            else:
                await self._create(pod)
                await self._set(pod, is_ready=self._rng.random() < 0.8)

    async def _create(self, pod: PodState) -> None:
        await self._cluster.create_pod(pod.name, {"app": "vllm"})
        pod.exists, pod.is_ours, pod.ip, pod.is_ready = True, True, "", False
        pod.is_terminating = pod.has_ended = False

    async def _set(self, pod: PodState, *, is_ready: bool, is_new: bool = False) -> None:
        if is_new or not pod.ip:
            self._num_addresses += 1
            number = self._num_addresses
            pod.ip = f"10.{self._base // 250}.{self._base % 250 + number // 250}.{number % 250}"
        pod.is_ready = is_ready
        await self._cluster.set_pod(pod.name, ip=pod.ip, is_ready=is_ready)

    async def _toggle(self, pod: PodState) -> None:
        if not pod.has_ended:
            await self._set(pod, is_ready=not pod.is_ready)

    async def _move(self, pod: PodState) -> None:
        if not pod.has_ended:
            await self._set(pod, is_ready=pod.is_ready, is_new=True)

    async def _relabel(self, pod: PodState) -> None:
        pod.is_ours = not pod.is_ours
        await self._cluster.label_pod(pod.name, {"app": "vllm" if pod.is_ours else "other"})

    async def _end(self, pod: PodState) -> None:
        if not pod.is_terminating and not pod.has_ended:
            pod.has_ended = True
            await self._cluster.set_pod(pod.name, ip=pod.ip, is_ready=False, phase="Failed")

    async def _delete(self, pod: PodState) -> None:
        if not pod.is_terminating and not pod.has_ended:
            pod.is_terminating = True
            await self._cluster.delete_pod(pod.name, is_graceful=True)

    async def _kill(self, pod: PodState) -> None:
        pod.exists = False
        await self._cluster.delete_pod(pod.name)


async def create(cluster: Cluster, *, num_pods: int) -> list[Writer]:
    share = num_pods // NUM_WRITERS + 1
    writers = [
        Writer(cluster, range(start, min(start + share, num_pods)), Random(start))
        for start in range(0, num_pods, share)
    ]
    await asyncio.gather(*(writer.create_all() for writer in writers))
    return writers


async def change(writers: list[Writer], times: int) -> None:
    await asyncio.gather(*(writer.change(times // len(writers)) for writer in writers))


def truth_of(writers: list[Writer]) -> Truth:
    return {address: is_ready for each in writers for address, is_ready in each.truth().items()}


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_the_pool_becomes_the_truth_after_changes_through_faults(
    cluster: Cluster, proxy: FaultyProxy, kubeconfig: Path
) -> None:
    """500 pods created, made ready, moved, relabelled, ended and deleted at random."""
    proxy.faults = ALL
    async with following(
        kubeconfig, lambda it, on: it.follow_pods("app=vllm", (8000,), on)
    ) as followed:
        writers = await create(cluster, num_pods=NUM_PODS)
        await change(writers, NUM_CHANGES)
        while proxy.not_made_yet():
            await change(writers, NUM_CHANGES // 10)
        proxy.faults = NONE
        await followed.until(truth_of(writers))
        assert len(truth_of(writers)) > NUM_PODS / 4
        assert followed.kubernetes.failures["gone"] > 0

        proxy.faults = ALL
        for _ in range(NUM_ROUNDS):
            await change(writers, 10 * NUM_WRITERS)
            await followed.until(truth_of(writers))


async def test_a_terminating_pod_stays_unready_until_it_is_gone(
    cluster: Cluster, kubeconfig: Path
) -> None:
    await cluster.create_pod("a", {"app": "vllm"})
    async with following(
        kubeconfig, lambda it, on: it.follow_pods("app=vllm", (8000, 8001), on)
    ) as followed:
        await followed.until({})
        await cluster.set_pod("a", ip="10.0.0.1", is_ready=False)
        await followed.until({"10.0.0.1:8000": False, "10.0.0.1:8001": False})
        await cluster.set_pod("a", ip="10.0.0.1", is_ready=True)
        await followed.until({"10.0.0.1:8000": True, "10.0.0.1:8001": True})
        await cluster.delete_pod("a", is_graceful=True)
        await followed.until({"10.0.0.1:8000": False, "10.0.0.1:8001": False})
        await cluster.delete_pod("a")
        await followed.until({})


@pytest.fixture
async def one_pod(cluster: Cluster, kubeconfig: Path) -> AsyncIterator[Followed]:
    """A ready pod, followed with watches of a second."""
    await cluster.create_pod("a", {"app": "vllm"})
    await cluster.set_pod("a", ip="10.0.0.1", is_ready=True)
    async with following(
        kubeconfig,
        lambda it, on: it.follow_pods("app=vllm", (8000,), on),
        times=WatchTimes(watch_s=1.0, relist_s=2.0),
    ) as followed:
        await followed.until({"10.0.0.1:8000": True})
        yield followed


async def test_a_connection_that_is_silent_for_too_long_is_given_up(
    cluster: Cluster, proxy: FaultyProxy, one_pod: Followed
) -> None:
    await eventually(lambda: sum(proxy.paths.values()) >= 2)
    proxy.is_silent = True
    await cluster.set_pod("a", ip="10.0.0.1", is_ready=False)
    await eventually(lambda: one_pod.kubernetes.failures["timeout"])
    assert one_pod.seen == {"10.0.0.1:8000": True}
    proxy.is_silent = False
    await one_pod.until({"10.0.0.1:8000": False})


async def test_an_event_lost_without_a_sign_is_repaired_by_a_list(
    cluster: Cluster, proxy: FaultyProxy, one_pod: Followed
) -> None:
    proxy.faults = Faults(swallowed=1.0)
    await cluster.set_pod("a", ip="10.0.0.1", is_ready=False)

    await one_pod.until({"10.0.0.1:8000": False})
    assert one_pod.kubernetes.lists["pods"] >= 2


async def test_refusals_change_nothing_and_are_counted(
    cluster: Cluster, proxy: FaultyProxy, one_pod: Followed
) -> None:
    proxy.faults = Faults(error_status=1.0)
    counts = one_pod.kubernetes.failures
    await eventually(lambda: all(counts[f"status_{status}"] for status in (429, 500, 503)))
    assert one_pod.seen == {"10.0.0.1:8000": True}
    assert one_pod.num_reports == 1
    await cluster.set_pod("a", ip="10.0.0.2", is_ready=True)
    proxy.faults = NONE
    await one_pod.until({"10.0.0.2:8000": True})
    await eventually(lambda: one_pod.kubernetes.contact_age_s < 40.0)


async def test_a_pod_is_in_the_group_that_its_label_says_now(
    cluster: Cluster, one_pod: Followed
) -> None:
    def groups() -> list[str]:
        return [endpoint.group for endpoint in one_pod.endpoints or ()]

    assert groups() == [""]
    await cluster.label_pod("a", {"extproc/group": "l4"})
    await eventually(lambda: groups() == ["l4"])
    await cluster.label_pod("a", {"extproc/group": None})
    await eventually(lambda: groups() == [""])
