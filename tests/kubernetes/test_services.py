"""The endpoints of a Service by its EndpointSlices, through the faulty proxy.

An API server refuses loopback addresses in slices, so nothing is sent to these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.faultyproxy import HARSH, NONE, FaultyProxy
from tests.kubernetes.following import Truth, following
from tests.waiting import eventually

NUM_PODS = 60
NUM_CHANGES = 150
NUM_SLICES = 4
NUM_SECOND_SLICES = 2

CONDITIONS: tuple[tuple[Mapping[str, bool], bool], ...] = (
    ({}, True),
    ({"ready": True}, True),
    ({"ready": True, "serving": True, "terminating": False}, True),
    ({"ready": False}, False),
    ({"ready": False, "serving": False}, False),
    ({"ready": False, "serving": True, "terminating": True}, False),
    ({"ready": True, "serving": True, "terminating": True}, False),
    ({"ready": True, "serving": False}, False),
)
"""Conditions in a slice, and whether new requests may go there."""


def endpoint(number: int, address: str, conditions: Mapping[str, bool]) -> dict[str, Any]:
    target = {"kind": "Pod", "name": f"pod-{number}", "uid": f"uid-{number}"}
    return {"addresses": [address], "conditions": dict(conditions), "targetRef": target}


class Service:
    """Pods spread over slices of both address families; some pods are in both."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self._cluster = cluster
        self._rng = rng
        self._slice_of: dict[int, int] = {}
        self._conditions: dict[int, tuple[Mapping[str, bool], bool]] = {}

    def truth(self) -> Truth:
        return {
            self._address(number, for_port=True): self._conditions[number][1]
            for number in self._slice_of
        }

    async def change(self) -> None:
        """Put some pod somewhere, or take it away."""
        number = self._rng.randrange(NUM_PODS)
        before = self._slice_of.pop(number, None)
        touched = {before} if before is not None else set()
        if before is None or self._rng.random() < 0.7:
            families = range(NUM_SLICES)
            self._slice_of[number] = self._rng.choice(
                families[NUM_SECOND_SLICES:]
                if self._is_v6(number)
                else families[:NUM_SECOND_SLICES]
            )
            self._conditions[number] = self._rng.choice(CONDITIONS)
            touched.add(self._slice_of[number])
        for index in self._rng.sample(sorted(touched), len(touched)):
            await self._write(index)
        if self._is_dual(number):
            await self._write_seconds()

    def _is_v6(self, number: int) -> bool:
        return number % 3 == 0

    def _is_dual(self, number: int) -> bool:
        return number % 3 == 1

    def _address(self, number: int, *, for_port: bool = False, is_second: bool = False) -> str:
        is_v6 = self._is_v6(number) or is_second
        ip = f"2001:db8::{number + 1:x}" if is_v6 else f"10.1.0.{number + 1}"
        return f"{f'[{ip}]' if is_v6 else ip}:8000" if for_port else ip

    async def _write(self, index: int) -> None:
        endpoints = [
            endpoint(number, self._address(number), self._conditions[number][0])
            for number, at in self._slice_of.items()
            if at == index
        ]
        family = "IPv4" if index < NUM_SECOND_SLICES else "IPv6"
        if endpoints or index % 2:
            ports = ({"name": "metrics", "port": 9090}, {"name": "http", "port": 8000})
            name, service = f"vllm-{index}", "vllm"
            await self._cluster.put_slice(name, service, endpoints, ports=ports, family=family)
        else:
            await self._cluster.put_slice(f"vllm-{index}", "vllm", [], ports=(), family=family)
            await self._cluster.delete_slice(f"vllm-{index}")

    async def _write_seconds(self) -> None:
        """The other family's addresses of pods that have two."""
        endpoints = [
            endpoint(number, self._address(number, is_second=True), self._conditions[number][0])
            for number in self._slice_of
            if self._is_dual(number)
        ]
        ports = ({"name": "http", "port": 8000},)
        await self._cluster.put_slice("second", "vllm", endpoints, ports=ports, family="IPv6")


@pytest.mark.parametrize("port", ["http", 8000])
async def test_the_pool_is_the_union_of_the_services_slices(
    cluster: Cluster, proxy: FaultyProxy, kubeconfig: Path, port: str | int
) -> None:
    """Both families, every condition, and one endpoint for a pod that has two addresses."""
    proxy.faults = HARSH
    service = Service(cluster, Random(3))
    await cluster.put_slice("other", "other", [endpoint(99, "10.9.9.9", {})])
    async with following(
        kubeconfig, lambda it, on: it.follow_service("vllm", on, port=port)
    ) as followed:
        for _ in range(NUM_CHANGES):
            await service.change()
        proxy.faults = NONE
        await followed.until(service.truth())
        assert len(service.truth()) > NUM_PODS / 3
        assert {each.name for each in followed.endpoints or ()} <= {
            f"pod-{number}" for number in range(NUM_PODS)
        }


async def test_a_service_with_one_port_needs_no_port_name(
    cluster: Cluster, kubeconfig: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With several ports the endpoints stay as they were, and a warning says so."""
    one = ({"name": "http", "port": 8000},)
    two = (*one, {"name": "metrics", "port": 9090})
    await cluster.put_slice("a", "vllm", [endpoint(1, "10.1.0.1", {})], ports=one)
    async with following(kubeconfig, lambda it, on: it.follow_service("vllm", on)) as followed:
        await followed.until({"10.1.0.1:8000": True})
        with caplog.at_level(logging.WARNING):
            await cluster.put_slice("a", "vllm", [endpoint(1, "10.1.0.2", {})], ports=two)
            await eventually(lambda: "http (8000), metrics (9090)" in caplog.text)
        assert followed.seen == {"10.1.0.1:8000": True}
        await cluster.put_slice("a", "vllm", [endpoint(1, "10.1.0.2", {})], ports=one)
        await followed.until({"10.1.0.2:8000": True})


async def test_a_service_that_gives_no_pods_is_a_warning_that_says_why(
    cluster: Cluster, kubeconfig: Path
) -> None:
    """A misspelled name or port looks like a Service that has no pods just now."""
    async with following(
        kubeconfig, lambda it, on: it.follow_service("vllm", on, port="http")
    ) as followed:
        found = followed.kubernetes.warnings
        await eventually(lambda: "Service vllm has no EndpointSlices" in "".join(found()))
        grpc = ({"name": "grpc", "port": 8000},)
        await cluster.put_slice("a", "vllm", [endpoint(1, "10.1.0.1", {})], ports=grpc)
        await eventually(lambda: found() == ["Service vllm has no port http, only: grpc (8000)"])
        http = ({"name": "http", "port": 8000},)
        await cluster.put_slice("a", "vllm", [endpoint(1, "10.1.0.1", {})], ports=http)
        await followed.until({"10.1.0.1:8000": True})
        assert found() == []
