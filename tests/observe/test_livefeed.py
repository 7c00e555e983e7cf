"""What a frame of the live page says, and that it stays small."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import Costs, Decode
from extproc.learned.slowness import SlowPods
from extproc.observe.attainment import Attainment
from extproc.observe.decisions import DecisionsService
from extproc.observe.livefeed import MAX_ADAPTERS, MAX_DECISIONS, MAX_PODS, MAX_WARNINGS, LiveFeed
from extproc.observe.telemetry import Telemetry
from extproc.passes import last
from extproc.pods.completion import DecisionRecord, Ended
from extproc.queue import HoldQueue, Ticket
from extproc.queue.status import describe_queue
from extproc.rejections import saturated
from extproc.types import EndpointView, ModelCard, Outcome, Pick, Rejection, Snapshot
from tests.builders import address, completion, endpoint_view, pick, request


class Scene:
    """A feed over values that a test sets."""

    def __init__(self, *views: EndpointView, adapters: Iterable[str] = ("a", "b", "c")) -> None:
        self.now = 100.0
        self.views = views
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.knows_times = True
        self.queue = HoldQueue()
        self.decisions = DecisionsService(1000)
        self.telemetry = Telemetry(snapshot=self.snapshot, version="1")
        self.attainment = Attainment(0.5)
        cards = {name: ModelCard(name, parent="base") for name in adapters}
        registry = {"base": ModelCard("base"), **cards}
        self.feed = LiveFeed(
            about={"version": "1.2.3", "router": "r1", "started_wall_ms": 5},
            snapshot=self.snapshot,
            queue=lambda: describe_queue(self.queue, now=self.now),
            registry=lambda: registry,
            decisions=self.decisions,
            telemetry=self.telemetry,
            attainment=self.attainment,
            knows_times=lambda: self.knows_times,
            health=lambda: self.reasons,
            warnings=lambda: self.warnings,
            policy=lambda: "founding",
            slow=SlowPods(lambda _address: ""),
            shadow=lambda: None,
            clock=lambda: self.now,
            wall_clock=lambda: 1_700_000_000.5,
        )

    def snapshot(self) -> Snapshot:
        return Snapshot(self.views, self.now)

    def decide(self, decision: Pick | Rejection, seconds: float = 0.000_1) -> None:
        self.telemetry.routed(decision, seconds)
        if isinstance(decision, Rejection):
            self.telemetry.rejections.add((decision.reason,))
        self.decisions.publish(DecisionRecord(decision, 1_700_000_000.25, seconds, path="/p"))

    def frame(self, after_s: float = 0.25) -> Any:
        self.now += after_s
        return json.loads(last(self.feed.compose()))


def test_a_pod_is_shown_with_its_time_per_token_and_that_over_its_peers() -> None:
    times_s = (0.01, 0.01, 0.024)
    scene = Scene(
        *(
            endpoint_view(number, num_running=1, costs=Costs(decode=Decode(1, token_s)))
            for number, token_s in enumerate(times_s, start=1)
        )
    )
    for _ in range(40):
        scene.now += 1
        scene.feed.slow.update(scene.snapshot())
    pods = scene.frame()["pods"]

    assert [each["token_ms"] for each in pods] == [10.0, 10.0, 24.0]
    assert [each["slowness"] for each in pods] == [0.42, 0.42, 2.4]  # over the slower of two
    assert [each["slow"] for each in pods] == [False, False, True]


def test_warnings_are_shown_the_first_of_many_and_shortened() -> None:
    scene = Scene()
    scene.warnings = ["x" * 1000, *"abcdefg"]

    frame = scene.frame()

    assert (len(frame["warnings"]), frame["num_warnings"]) == (MAX_WARNINGS, 8)
    assert frame["warnings"][0].endswith("x…")


def test_whether_a_pod_without_a_report_is_slow_is_unknown() -> None:
    (pod,) = Scene(endpoint_view(1, is_known=False)).frame()["pods"]

    assert pod["slow"] is None


def test_a_pod_is_shown_with_its_load_and_the_age_of_its_report() -> None:
    view = endpoint_view(
        1,
        name="pod-1",
        reported_at_s=99.0,
        pending_by_adapter={"a": 2},
        num_in_flight=1,
        num_running=1,
        num_waiting=3,
        num_deferred=2,
        kv_usage_ratio=0.25,
        max_loras=4,
        gpu_adapters=("a",),
        cpu_adapters=("b", "c"),
    )

    assert Scene(view).frame(after_s=0.5)["pods"] == [
        {
            "name": "pod-1",
            "address": "10.0.0.1:8000",
            "ready": True,
            "known": True,
            "silent": False,
            "unreachable": False,
            "ejected": False,
            "asleep": False,
            "dead": False,
            "age_s": 1.5,
            "in_flight": 1,
            "pending": 2,
            "running": 1,
            "waiting": 3,
            "deferred": 2,
            "kv": 0.25,
            "active": 1,
            "slots": 4,
            "in_gpu": 1,
            "in_cpu": 2,
            "token_ms": None,
            "slowness": None,
            "slow": False,
        }
    ]


def test_the_queue_is_shown_with_what_it_needs_next() -> None:
    scene = Scene()
    for adapter in ("b", "a"):
        ticket = Ticket(request(adapter), lambda: None, give_up_s=inf, held_at_s=scene.now)
        scene.queue.add(ticket, now=scene.now)
    queue = scene.frame(after_s=1.5)["queue"]

    assert (queue["num_held"], queue["oldest_s"]) == (2, 1.5)
    assert queue["routes"] == [["", 0, 2]]
    assert queue["adapters"] == ["b", "a"]


def test_a_row_says_for_each_pod_where_the_adapter_is() -> None:
    views = (
        endpoint_view(1, gpu_adapters=("a",), pending_by_adapter={"a": 2, "b": 1}),
        endpoint_view(2, cpu_adapters=("a", "b")),
        endpoint_view(3, registered=frozenset({"base", "b"})),
        endpoint_view(4, registered=None),
    )
    frame = Scene(*views).frame()

    assert frame["adapters"] == [
        ["a", "gc.?", [[0, 2]]],
        ["b", "rcr?", [[0, 1]]],
        ["c", "rr.?", []],
    ]
    assert (frame["num_adapters"], frame["num_pods"]) == (3, 4)


def test_the_most_active_adapters_come_first_then_those_in_gpu_slots() -> None:
    views = (
        endpoint_view(1, gpu_adapters=("c",), pending_by_adapter={"b": 1}),
        endpoint_view(2, pending_by_adapter={"d": 1, "b": 1}),
    )
    frame = Scene(*views, adapters="abcd").frame()

    assert [name for name, *_ in frame["adapters"]] == ["b", "d", "c", "a"]


def test_the_base_model_is_no_adapter() -> None:
    assert [name for name, *_ in Scene(endpoint_view(1), adapters="a").frame()["adapters"]] == ["a"]


def test_what_is_too_much_is_cut_and_counted() -> None:
    names = [f"adapter-{number:04}" for number in range(MAX_ADAPTERS + 5)]
    registered = frozenset({"base", *names})
    views = [
        EndpointView(f"10.0.{n // 200}.{n % 200}:80", name=f"pod-{n:03}", registered=registered)
        for n in range(MAX_PODS + 3)
    ]
    scene = Scene(*views, adapters=names)
    for _ in range(MAX_DECISIONS + 7):
        scene.decide(pick(candidates=tuple(views)))
    frame = scene.frame()

    assert (len(frame["adapters"]), frame["num_adapters"]) == (MAX_ADAPTERS, MAX_ADAPTERS + 5)
    assert (len(frame["pods"]), frame["num_pods"]) == (MAX_PODS, MAX_PODS + 3)
    assert {len(cells) for _, cells, _ in frame["adapters"]} == {MAX_PODS}
    assert (len(frame["decisions"]), frame["num_decisions_left_out"]) == (MAX_DECISIONS, 7)
    assert scene.frame()["num_decisions_left_out"] == 0


def test_decisions_are_explained_newest_first() -> None:
    view = endpoint_view(1, name="pod-1")
    scene = Scene(view)
    info = request("a", path="/v1/completions")
    scene.decide(pick(info=info, candidates=(view,), reason="cold"))
    scene.decide(saturated("b", 2))

    assert scene.frame()["decisions"] == [
        {
            "n": 2,
            "wall_ms": 1_700_000_000_250,
            "model": "b",
            "path": "/p",
            "status": 429,
            "reason": "saturated",
            "text": "Rejected with 429 saturated for b, retry after 2 s: Every pod that "
            "serves this model is saturated. Retry later.",
            "end": "",
        },
        {
            "n": 1,
            "wall_ms": 1_700_000_000_250,
            "model": "a",
            "path": "/v1/completions",
            "pod": "pod-1",
            "reason": "cold",
            "us": 100,
            "text": "pod-1: the only pod that could take it.",
            "end": "",
        },
    ]


def test_a_decision_says_how_its_pick_ended_as_soon_as_that_is_known() -> None:
    scene = Scene(endpoint_view(1))
    chosen = pick()
    scene.decide(chosen)
    before = scene.frame()["decisions"][0]["end"]
    scene.decisions.ended(Ended(chosen, Outcome.COMPLETED, completion(chosen.id)), 1.0)
    after = scene.frame()["decisions"][0]["end"]

    assert (before, after) == (
        "",
        f"It ended after 200 ms with status 200, its first token after 100 ms; "
        f"served by {address(1)}.",
    )


def test_first_tokens_are_told_by_adapter_the_latest_first() -> None:
    """Of streamed responses that have ended: of others they are not known."""
    scene = Scene(endpoint_view(1))
    for number, (model, first_s) in enumerate(
        [("slow", 3.0), ("fast", 0.1), ("fast", 0.2), ("fast", 0.7), ("unstreamed", None)]
    ):
        chosen = pick(info=request(model), id=f"r-{number}")
        scene.decide(chosen)
        entry = completion(chosen.id, first_body_byte_s=first_s, duration_s=5.0)
        scene.decisions.ended(Ended(chosen, Outcome.COMPLETED, entry), 1.0)
    scene.decide(pick(info=request("under way"), id="r-9"))
    scene.decide(saturated("a", 1))

    assert scene.frame()["first"] == [["slow", 1, 3.0, 3.0], ["fast", 3, 0.2, 0.7]]


def test_rates_are_those_since_somebody_looks() -> None:
    scene = Scene(endpoint_view(1))
    scene.decide(pick(), seconds=9.0)
    assert scene.frame()["rates"] is None

    for _ in range(6):
        scene.decide(pick(), seconds=0.000_2)
    scene.decide(saturated("a", 1), seconds=0.000_9)

    assert scene.frame(after_s=2.0)["rates"] == {
        "decisions_per_s": 3.5,
        "rejections_per_s": 0.5,
        "decision_us": 300.0,
    }
    assert scene.frame(after_s=60.0)["rates"] is None


def test_without_decisions_the_time_for_one_is_not_known() -> None:
    scene = Scene()
    scene.frame()

    assert scene.frame()["rates"] == {
        "decisions_per_s": 0,
        "rejections_per_s": 0,
        "decision_us": None,
    }


def test_each_route_has_its_share_and_unknown_times_are_marked() -> None:
    scene = Scene()
    for first_byte_s in (0.1, 0.9, 0.2):
        entry = completion(first_body_byte_s=first_byte_s, duration_s=1.0)
        scene.attainment.completed("/v1/completions", entry, scene.now)
    known = scene.frame()["slo"]
    scene.knows_times = False

    assert known == {
        "ttft_s": 0.5,
        "window_s": 60.0,
        "known": True,
        "paths": [["/v1/completions", 2, 3]],
    }
    assert scene.frame()["slo"]["known"] is False


def test_readiness_version_and_policy_are_shown() -> None:
    scene = Scene()
    scene.reasons = ["draining"]
    frame = scene.frame()

    assert (frame["health"], frame["policy"]) == (["draining"], "founding")
    assert frame["about"] == {"version": "1.2.3", "router": "r1", "started_wall_ms": 5}
    assert frame["wall_ms"] == 1_700_000_000_500


@pytest.mark.parametrize("hostile", ["\n\ndata: {}\n\n", "\r\revent: x", "</script>", "\x00", "名"])
def test_a_name_cannot_break_out_of_its_event(hostile: str) -> None:
    scene = Scene(endpoint_view(1, name=hostile))
    scene.decide(Rejection(404, saturated("", 1).reason, hostile, model=hostile))
    composed = last(scene.feed.compose())

    assert not set(composed) & set(b"\r\n\0")
    assert json.loads(composed)["decisions"][0]["model"] == hostile


def test_names_of_any_length_are_shortened() -> None:
    scene = Scene(endpoint_view(1, name="n" * 5000), adapters=["a" * 5000])
    for _ in range(MAX_DECISIONS):
        scene.decide(Rejection(404, saturated("", 1).reason, "m" * 5000, model="x" * 5000))

    assert len(last(scene.feed.compose())) < 40_000


@given(
    st.lists(
        st.tuples(
            st.none() | st.frozensets(st.sampled_from("abcdef")),
            st.lists(st.sampled_from("abcdef"), unique=True),
            st.lists(st.sampled_from("abcdef"), unique=True),
        ),
        max_size=6,
    )
)
def test_every_cell_is_what_its_pod_says(pods: list[Any]) -> None:
    views = [
        endpoint_view(n, registered=listed, gpu_adapters=tuple(gpu), cpu_adapters=tuple(cpu))
        for n, (listed, gpu, cpu) in enumerate(pods)
    ]
    for name, cells, _ in Scene(*views, adapters="abcdef").frame()["adapters"]:
        for view, cell in zip(views, cells, strict=True):
            listed = view.registered
            expected = "?" if listed is None else "r" if name in listed else "."
            expected = "c" if name in view.cpu_adapters else expected
            assert cell == ("g" if name in view.gpu_adapters else expected)


def test_a_large_pool_makes_a_frame_of_modest_size() -> None:
    """48 pods, 300 adapters and full decisions: what a viewer gets four times a second."""
    names = [f"customer-{number:03}" for number in range(300)]
    registered = frozenset({"base", *names})
    views = [
        endpoint_view(
            n,
            name=f"vllm-llama-{n:02}",
            registered=registered,
            gpu_adapters=tuple(names[n * 6 : n * 6 + 6]),
            cpu_adapters=tuple(names[n * 6 + 6 : n * 6 + 20]),
            pending_by_adapter=dict.fromkeys(names[n * 6 : n * 6 + 8], 2),
        )
        for n in range(48)
    ]
    scene = Scene(*views, adapters=names)
    for _ in range(MAX_DECISIONS):
        scene.decide(pick(info=request(names[0]), candidates=tuple(views), policy="founding"))

    assert len(last(scene.feed.compose())) < 64_000
