"""One request of each gateway, over gRPC, through the service as `extproc epp` starts it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
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
from tests.request.gateways import GATEWAYS, OBJECTIVE, Gateway, Metadata
from tests.service.serving import Service, configuration, serving
from tests.waiting import eventually

MODELS = ("only-0", "only-1")
_EOF: Any = getattr(aio, "EOF")  # noqa: B009

each_gateway = pytest.mark.parametrize("gateway", GATEWAYS, ids=str)
each_that_tells_of_responses = pytest.mark.parametrize(
    "gateway", [each for each in GATEWAYS if each.has_responses], ids=str
)


pytestmark = pytest.mark.usefixtures("on_each_transport")


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    configs = [PodConfig(name=f"pod-{n}", adapters=[MODELS[n]]) for n in (0, 1)]
    async with running_pods(*configs) as running:
        yield running


@dataclass(frozen=True)
class Answered:
    """What the router said to one request."""

    destination: str
    removed: tuple[str, ...]
    status: int


class Exchange:
    """One call of a gateway."""

    def __init__(self, service: Service, gateway: Gateway) -> None:
        self.gateway = gateway
        self.call = service.channel.stream_stream(clients.PROCESS)()

    async def ask(
        self,
        data: bytes,
        extra: Mapping[str, str] | None = None,
        metadata: Metadata | None = None,
    ) -> Answered:
        """Send the request, as its gateway does, and read until its destination has come."""
        gateway = self.gateway
        await self.call.write(gateway.headers(extra=extra))
        await self.call.write(gateway.body(data, metadata=metadata))
        if not gateway.has_responses:
            await self.call.done_writing()
        while isinstance(reply := await self.call.read(), bytes):
            message = pb.ProcessingResponse.FromString(reply)
            if message.HasField("immediate_response"):
                return Answered("", (), message.immediate_response.status.code)
            phase = getattr(message, message.WhichOneof("response"))
            mutation = phase.response.header_mutation
            for option in mutation.set_headers:
                if option.header.key == "x-gateway-destination-endpoint":
                    told = option.header.raw_value.decode()
                    return Answered(told, tuple(mutation.remove_headers), 0)
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
            answered = await exchange.ask(body(model, prompt=1_000_000 * "p"))

            assert answered.destination == pod.address
            if gateway.has_responses:
                assert await service.in_flight() == 1
                await exchange.call.done_writing()
            await exchange.read_to_the_end()
            await eventually(partial(has_in_flight, service, 0))


async def has_in_flight(service: Service, number: int) -> bool:
    return await service.in_flight() == number


async def test_a_request_without_a_reported_end_is_counted_until_the_pods_report_it(
    pods: list[RunningPod],
) -> None:
    [silent] = [each for each in GATEWAYS if not each.has_responses]
    sections = {"request": DEFAULTS["request"]}
    for grace_s, num_in_flight in ((600, 1), (0, 0)):
        completions = {"source": "scrape", "scrape_grace_s": grace_s}
        config = configuration(pods, completions=completions, **sections)
        async with serving(config) as service:
            exchange = Exchange(service, silent)
            await exchange.ask(body("only-0"))
            await exchange.read_to_the_end()
            await eventually(partial(has_in_flight, service, num_in_flight))


@each_gateway
async def test_a_control_header_is_read_and_removed(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    async with serving(epp(pods)) as service:
        answered = await Exchange(service, gateway).ask(body("only-0"), {OBJECTIVE: "batch"})

    assert answered.removed == (OBJECTIVE,)


@each_gateway
async def test_a_subset_that_comes_with_the_body_is_honoured(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    hints: list[Metadata] = [
        {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [pod.address]}}
        for pod in pods
    ]
    async with serving(epp(pods)) as service:
        inside = await Exchange(service, gateway).ask(body("only-0"), metadata=hints[0])
        outside = await Exchange(service, gateway).ask(body("only-0"), metadata=hints[1])

    assert (inside.destination, outside.status) == (pods[0].address, 503)


@each_gateway
async def test_what_is_no_request_for_a_model_is_refused(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    async with serving(epp(pods)) as service:
        unknown = await Exchange(service, gateway).ask(body("nobody-has-it"))
        garbage = await Exchange(service, gateway).ask(b'{"lora_name": "x"}')

    assert (unknown.status, garbage.status) == (404, 400)


@each_that_tells_of_responses
async def test_a_finished_request_counts_as_completed(
    gateway: Gateway, pods: list[RunningPod]
) -> None:
    async with serving(epp(pods)) as service:
        exchange = Exchange(service, gateway)
        answered = await exchange.ask(body("only-1"))
        await exchange.call.write(gateway.response(answered.destination))
        await exchange.call.done_writing()
        await exchange.read_to_the_end()
        await eventually(partial(has_in_flight, service, 0))
        completed = await service.metric('extproc_completions_total{outcome="completed"}')

    assert completed == 1
