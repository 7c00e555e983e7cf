"""One request of each gateway, over gRPC, through the service as `extproc epp` starts it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

from extproc.commands.eppplan import DEFAULTS
from extproc.lab.fakepod.pod import PodConfig, RunningPod
from tests import clients
from tests.builders import body
from tests.fakepods import running_pods
from tests.request.ext_proc import response_body
from tests.request.gateways import GATEWAYS, Gateway
from tests.service.serving import Service, configuration, serving
from tests.waiting import eventually

MODELS = ("only-0", "only-1")
_EOF: Any = getattr(aio, "EOF")  # noqa: B009

each_gateway = pytest.mark.parametrize("gateway", GATEWAYS, ids=str)
each_that_tells_of_responses = pytest.mark.parametrize(
    "gateway", [each for each in GATEWAYS if each.has_responses], ids=str
)


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    configs = [PodConfig(name=f"pod-{n}", adapters=[MODELS[n]]) for n in (0, 1)]
    async with running_pods(*configs) as running:
        yield running


class Exchange:
    """One call of a gateway."""

    def __init__(self, service: Service, gateway: Gateway) -> None:
        self.gateway = gateway
        self.call = service.channel.stream_stream(clients.PROCESS)()

    async def ask(self, data: bytes) -> str:
        """Send the request, as its gateway does, and read until its destination has come."""
        await self.call.write(self.gateway.headers())
        await self.call.write(self.gateway.body(data))
        if not self.gateway.has_responses:
            await self.call.done_writing()
        while isinstance(reply := await self.call.read(), bytes):
            message = pb.ProcessingResponse.FromString(reply)
            phase = getattr(message, message.WhichOneof("response"))
            for option in phase.response.header_mutation.set_headers:
                if option.header.key == "x-gateway-destination-endpoint":
                    return str(option.header.raw_value.decode())
        raise AssertionError(f"no destination: {await self.call.code()}")

    async def read_to_the_end(self) -> None:
        """Everything else that the router says; it ends the call with OK."""
        while await self.call.read() is not _EOF:
            pass
        assert (await self.call.code()).value[0] == 0


def epp(pods: list[RunningPod]) -> dict[str, Any]:
    """The configuration of a router behind somebody else's gateway."""
    sections = {name: DEFAULTS[name] for name in ("completions", "request")}
    return configuration(pods, **sections)


@each_gateway
async def test_a_request_goes_where_its_adapter_is(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    async with serving(epp(pods)) as service:
        for model, pod in zip(MODELS, pods, strict=True):
            exchange = Exchange(service, gateway)
            destination = await exchange.ask(body(model, prompt=1_000_000 * "p"))

            assert destination == pod.address
            if gateway.has_responses:
                assert await service.in_flight() == 1
                await exchange.call.done_writing()
            await exchange.read_to_the_end()
            await eventually(partial(has_in_flight, service, 0))


async def has_in_flight(service: Service, number: int) -> bool:
    return await service.in_flight() == number


@each_that_tells_of_responses
async def test_a_finished_request_counts_as_completed(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    async with serving(epp(pods)) as service:
        exchange = Exchange(service, gateway)
        destination = await exchange.ask(body("only-1"))
        await exchange.call.write(gateway.response(destination))
        await exchange.call.write(response_body(b"x"))
        await exchange.call.done_writing()
        await exchange.read_to_the_end()
        await eventually(partial(has_in_flight, service, 0))
        completed = await service.metric('extproc_completions_total{outcome="completed"}')

    assert completed == 1
