"""A router with all its parts and pods in name only, for benchmarks of single passes.

Nothing runs by itself: the event loop never gets to it, so a benchmark calls each pass, and the
timers that a pass sets.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from bench.holdpolicy import Hold
from bench.hotpath import DrivenLoop
from extproc.config.configfile import parse_config
from extproc.config.liveconfig import LiveConfig
from extproc.lab.fakepod.formats import model_list
from extproc.pods.completion import DecisionRecord
from extproc.service.adminport import make_feed
from extproc.service.clocks import Clocks
from extproc.service.parts import Parts
from extproc.types import Endpoint, LoadReport, Pick, RequestInfo
from extproc.wire.rpc import Call, Code, Session

_CONFIG = """
discovery: {static: ["10.0.0.0:8000"], max_endpoints: 2000}
request: {trusted_headers: [fairness_id, model_rewrite]}
"""
_SLOTS = 8
_IN_FLIGHT_PER_POD = 8
_NUM_TENANTS = 100
_HOLD_S = 3600.0
_TENANT = "x-gateway-inference-fairness-id"
BUFFERED, FULL_DUPLEX = 2, 4
"""Body modes of Envoy's filter."""


class Sink(Call):
    """The call of a session: takes what is sent.

    Attributes:
        is_ended: Nothing more comes.
    """

    def __init__(self) -> None:
        self.is_ended = False

    def send(self, message: bytes) -> None:
        """Forget a message."""

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """Note the end."""
        assert code is Code.OK, details
        self.is_ended = True

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Have memory enough."""


class BenchedRouter:
    """A router whose pods all list the same adapters and have work for eight of them each.

    Made while a `DrivenLoop` runs.
    """

    def __init__(self, num_pods: int, num_adapters: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DrivenLoop)
        self.loop, self.rng = loop, random.Random(1)
        self.adapters = [f"adapter-{number}" for number in range(num_adapters)]
        self.addresses = [f"10.0.{n // 250}.{n % 250}:8000" for n in range(num_pods)]
        self._started_wall_s = dict.fromkeys(self.addresses, 1e9)
        config = parse_config(_CONFIG)
        clocks = Clocks(lambda: loop.now, lambda: 1e9 + loop.now, self.rng)
        self.parts = parts = Parts(config, Hold(_HOLD_S, only_tenants=True), None, clocks=clocks)
        live = LiveConfig(config, None, "", parse=parse_config, configure=parts.configure)
        parts.add_metrics(lambda: not parts.why_not_ready())
        live.add_metrics(parts.telemetry)
        self.feed = make_feed(parts, parts.why_not_ready, list)
        self.set_endpoints(self.addresses)
        for address in self.addresses:
            parts.readiness.record_asked(address, has_listed=True)

    def set_endpoints(self, addresses: list[str]) -> None:
        """Have these pods."""
        self.parts.endpoints.set([Endpoint(each) for each in addresses])

    def models_page(self, root: str = "/adapters") -> bytes:
        """Return what vLLM's `/v1/models` is: the base model and all adapters."""
        paths = {name: f"{root}/{name}" for name in self.adapters}
        return json.dumps(model_list("base", paths, 8192, 1)).encode()

    def restart(self, address: str) -> None:
        """Record the scrape of a pod that has just started again."""
        self._started_wall_s[address] += 60.0
        self.report(address)

    def report(self, address: str) -> None:
        """Record a scrape of a pod, with adapters at random."""
        active = frozenset(self.rng.choices(self.adapters, k=_SLOTS))
        report = LoadReport(
            num_running=len(active),
            kv_usage_ratio=0.3,
            max_loras=_SLOTS,
            active_adapters=active,
            adapter_log=tuple([(adapter, 1e9 + self.loop.now) for adapter in active]),
            process_start_wall_s=self._started_wall_s[address],
        )
        self.parts.routing.pool.record_report(address, report, taken_at_s=self.loop.now)

    def fill(self) -> None:
        """Have some requests in flight on every pod, decided and counted."""
        parts, now = self.parts, self.loop.now
        for address in self.addresses:
            for number in range(_IN_FLIGHT_PER_POD):
                adapter = self.rng.choice(self.adapters)
                request = RequestInfo(adapter, adapter, body_bytes=2_000, arrived_at_s=now)
                pick = Pick(f"{address}-{number}", request, (address,), "bench", "first")
                parts.routing.pool.flights.start(pick, now=now)
                parts.telemetry.routed(pick, 1e-4)
                parts.recorder.decisions.publish(DecisionRecord(pick, 1e9 + now, 1e-4))

    def open(self, headers: Mapping[str, str], mode: int = BUFFERED) -> tuple[Session, Sink]:
        """Return a stream whose request's headers have come, and what takes its answers."""
        [method] = self.parts.services.processor.methods()
        sink = Sink()
        session = method.open(sink, {})
        message = pb.ProcessingRequest()
        message.protocol_config.request_body_mode = mode
        usual = {":method": "POST", ":path": "/v1/chat/completions", "x-request-id": "request"}
        for name, value in {**usual, "content-type": "application/json", **headers}.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        session.receive(message.SerializeToString())
        return session, sink

    def hold(self, number: int) -> Session:
        """Return a stream whose request is held."""
        tenant = f"tenant-{number % _NUM_TENANTS}"
        session, _ = self.open({_TENANT: tenant, "x-request-id": f"request-{number}"})
        model = self.adapters[number % len(self.adapters)]
        content = [{"role": "user", "content": "How many pods are there?" * 8}]
        session.receive(body_message({"model": model, "messages": content}))
        return session


def body_message(body: object, *, is_last: bool = True) -> bytes:
    """Return a message with a body or a part of one; JSON of what is no bytes."""
    message = pb.ProcessingRequest()
    message.request_body.body = body if isinstance(body, bytes) else json.dumps(body).encode()
    message.request_body.end_of_stream = is_last
    return bytes(message.SerializeToString())
