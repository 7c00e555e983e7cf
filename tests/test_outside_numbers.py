"""Any page of a pod leads to bounded numbers for every reader, and to no exception."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.bounds import MAX_COUNT
from extproc.errors import ExpositionError
from extproc.gen import decisions_pb2
from extproc.learned.evidence import StreamEnd
from extproc.learned.slowness import SlowPods
from extproc.observe.admin import describe_snapshot
from extproc.observe.attainment import Attainment
from extproc.observe.decisionmessages import describe, encode
from extproc.observe.decisions import DecisionsService
from extproc.observe.livefeed import LiveFeed
from extproc.observe.observers import NAMES, Observers
from extproc.observe.recorder import Recorder
from extproc.observe.telemetry import Telemetry
from extproc.passes import last
from extproc.pods.accounting import Accounting
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.reports.listings import ModelsError, decode_models
from extproc.reports.orca import parse_orca
from extproc.routing.modelroutes import ModelRoute, ModelRoutes
from extproc.routing.policies import BUILT_IN
from extproc.routing.rewrites import Rewrites
from extproc.types import Hints, Outcome, Pick, Rejection
from tests.builders import BASE, address, by_pages, endpoint, picker_of, request, routing
from tests.wire.fake_call import begin

PAGE = (Path(__file__).parent / "golden" / "vllm-0.32-metrics.txt").read_text(encoding="utf-8")
VLLM = PROFILES["vllm"]
WANTED = [
    line
    for line in PAGE.splitlines()
    if not line.startswith("#") and any(line.startswith(family) for family in VLLM.families)
]
EXTREMES = st.sampled_from(
    [
        "5e9",
        "1e308",
        "1.7e308",
        "-1",
        "NaN",
        "+Inf",
        "-Inf",
        "9" * 400,
        "4294967296",
        "0.1",
        "1e-320",
    ]
)
NUMBERS = EXTREMES | st.floats().map(repr) | st.integers().map(str)
MODELS = b'{"data": [{"id": "base"}, {"id": "a", "parent": "base"}]}'


@st.composite
def pages(draw: st.DrawFn) -> bytes:
    """The parsed lines of a real page, some repeated for another engine, with any values."""
    lines = ["# TYPE vllm:lora_adapter_loaded gauge"]
    for line in WANTED:
        for engine in range(draw(st.integers(0, 2))):
            labelled = line.rpartition(" ")[0].replace('engine="0"', f'engine="{engine}"')
            slots = draw(EXTREMES)
            labelled = re.sub(r'max_lora="\d+"', f'max_lora="{slots}"', labelled)
            lines.append(f"{labelled} {draw(NUMBERS)}")
    level = draw(st.sampled_from(["gpu", "cpu"]))
    lines.append(f'vllm:lora_adapter_loaded{{adapter_name="a",level="{level}"}} {draw(NUMBERS)}')
    lines.append(
        f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="a,b",'
        f'waiting_lora_adapters=""}} {draw(NUMBERS)}'
    )
    return ("\n".join(lines) + "\n").encode()


def is_sound(value: Any) -> bool:
    """Return whether every number in it is finite and within the bound."""
    if isinstance(value, dict):
        return all(map(is_sound, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_sound, value))
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= 2e12  # a wall time in milliseconds
    return True


class Service:
    """A router with all its observers, over two pods."""

    def __init__(self, policy: str) -> None:
        self.now = 10.0
        routes = ModelRoutes([ModelRoute("all", ("*",))], {"low": -1})
        # every request is decided
        router = routing(picker_of(policy), routes=routes, max_hold_s=0)
        self.pool = router.pool
        self.pool.set_endpoints([endpoint(1), endpoint(2)])
        self.telemetry = Telemetry(snapshot=self.snapshot, version="1")
        self.decisions, self.attainment = DecisionsService(), Attainment(1.0)
        self.observers = Observers()
        self.accounting = accounting = Accounting(self.pool, "r")
        accounting.record_access_logs(1)
        self.recorder = Recorder(
            self.telemetry, self.decisions, self.attainment, accounting.knows_times,
            self.observers, routes.claim_of, Rewrites(rng=Random(1)), lambda: self.now,
            lambda: 1_700_000_000.0,
        )  # fmt: skip
        self.router = router
        self.feed = LiveFeed(
            about={}, snapshot=self.snapshot, queue=dict, registry=lambda: self.pool.models.by_name,
            decisions=self.decisions, telemetry=self.telemetry, attainment=self.attainment,
            knows_times=lambda: True, health=list, warnings=list, policy=lambda: policy,
            clock=lambda: self.now, slow=SlowPods(self.pool.group_of),
            shadow=lambda: None,
            wall_clock=lambda: 1_700_000_000.0,
        )  # fmt: skip
        self.watcher, session = begin(self.decisions.methods(), "Watch")
        session.receive(decisions_pb2.WatchRequest().SerializeToString())

    def snapshot(self) -> Any:
        return self.pool.snapshot(now=self.now)

    def record(self, number: int, page: bytes, models: bytes, orca: str) -> None:
        """Record a pod's pages as the app does."""
        self.now += 0.1
        self.pool.record_models(address(number), decode_models(models), now=self.now)
        report = parse_report(page, VLLM)
        self.pool.record_report(address(number), report, taken_at_s=self.now)
        self.pool.flights.reconcile(address(number), by_pages(0.0), now=self.now)
        load = parse_orca(orca)
        if load is not None:
            self.pool.record_orca(address(number), load)

    def check(self) -> None:
        """Check the numbers that every observer gets."""
        snapshot = describe_snapshot(self.snapshot())
        assert is_sound(snapshot)
        for view in snapshot["endpoints"]:
            assert 0 <= view["num_pending"] <= 3 * MAX_COUNT
            assert 0 <= view["kv_usage_ratio"] <= 1
        assert is_sound(json.loads(last(self.feed.compose())))
        assert self.router.models.body(None, "", now=self.now)
        for family in text_string_to_metric_families(
            generate_latest(self.telemetry.registry).decode()
        ):
            for sample in family.samples:
                assert math.isfinite(sample.value), sample
        for sequence, record in self.decisions.last(9):
            assert is_sound(json.loads(json.dumps(describe(sequence, record))))
            assert encode(sequence, record)


@given(
    st.lists(pages(), min_size=2, max_size=4),
    NUMBERS,
    st.sampled_from(sorted(BUILT_IN)),
    st.sampled_from(["", "low"]),
)
@example([b"vllm:num_requests_running 5e9\n"] * 2, "5e9", "least_pending", "")
@example(
    [b'vllm:num_requests_running{engine="0"} 1e308\nvllm:num_requests_running{engine="1"} 1e308\n']
    * 2,
    "1e308",
    "founding",
    "low",
)
def test_any_page_gives_bounded_numbers_and_every_request_a_decision(
    metrics: list[bytes], number: str, policy: str, objective: str
) -> None:
    service = Service(policy)
    created = number if re.fullmatch(r"-?\d{1,300}(\.\d+)?|-?\de\d{1,3}", number) else "1"
    models = MODELS.replace(b'"base"}', f'"base", "created": {created}}}'.encode(), 1)
    orca = f"TEXT kv_cache_usage_perc=0.5, num_requests_waiting={number}"
    for place, page in enumerate(metrics):
        service.record(1 + place % 2, page, models, orca)
        service.check()
        for model in ("a", BASE, "nobody"):
            asked = request(None, model=model, hints=Hints(objective))
            result = service.router.route(asked, now=service.now)
            service.recorder.decided(result, 0.001, now=service.now)
            if isinstance(result, Pick) and model == "a":
                end = StreamEnd(Outcome.COMPLETED)
                service.accounting.finish(result, end, now=service.now)
                service.recorder.ended(result, Outcome.COMPLETED)
            elif isinstance(result, Rejection):
                service.recorder.rejected(result, {":path": "/v1/completions"})
        service.check()

    assert service.observers.num_errors == dict.fromkeys(NAMES, 0)
    assert len(service.watcher.sent) == service.decisions.num_published == 3 * len(metrics)


@given(st.binary(max_size=200) | st.integers(0, len(PAGE)).map(lambda at: PAGE[:at].encode()))
def test_bytes_that_are_no_page_are_refused(page: bytes) -> None:
    service = Service("founding")
    for metrics, models in ((page, MODELS), (PAGE.encode(), page)):
        with suppress(ExpositionError, ModelsError):
            service.record(1, metrics, models, "TEXT")
        service.check()
