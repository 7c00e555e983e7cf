"""The benchmark of the request path drives what it says, and measures that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hyperframe.frame import DataFrame
from prometheus_client import generate_latest

from bench import checkouts, instructions
from bench.hotpath import DrivenLoop, HotPath, Load
from bench.meters import Meter, Proxy, Watch, dumped
from bench.recording import RECORDED, Ended, Recording, frames_of, messages_of
from bench.stages import EACH, EMPTY, MEASURES, STUBS, Measured, Plan, measured, put_aside
from extproc.stack.processes import StackError

FOUND: checkouts.Amounts = {("a", "request"): 10.0, ("a", "session"): 6.0, ("a", "calls"): None}


def in_driven_loop(steps: Callable[[DrivenLoop], Any]) -> Any:
    async def run() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DrivenLoop)
        return steps(loop)

    with asyncio.Runner(loop_factory=DrivenLoop) as runner:
        return runner.run(run())


def data_of(sent: bytes) -> bytes:
    return b"".join(frame.data for frame in frames_of(sent) if isinstance(frame, DataFrame))


def test_a_request_of_the_recording_has_the_id_and_the_body_that_it_is_given() -> None:
    body = b'{"model":"m"}' + b" " * 100_000
    stream_id, request_id, headers, reads = Recording(RECORDED.read_bytes()).request(7, body)

    (first,) = messages_of(data_of(headers))
    (second,) = messages_of(data_of(b"".join(reads)))
    fields = pb.ProcessingRequest.FromString(first).request_headers.headers.headers
    sent = pb.ProcessingRequest.FromString(second).request_body

    assert {frame.stream_id for frame in frames_of(headers)} == {stream_id}
    assert {each.key: each.raw_value for each in fields}["x-request-id"] == request_id.encode()
    assert (sent.body, sent.end_of_stream) == (body, True)
    assert len(reads) == 2


def test_a_log_of_the_recording_tells_of_the_picks_that_it_is_given() -> None:
    ended = [Ended("a-1", "10.0.0.1:8000", "id-1"), Ended("a-2", "10.0.0.2:8001", "id-2")]
    sent = Recording(RECORDED.read_bytes()).log(ended, now_wall_s=1e9)

    (message,) = messages_of(data_of(sent))
    entries = als_pb2.StreamAccessLogsMessage.FromString(message).http_logs.log_entry
    commons = [entry.common_properties for entry in entries]
    places = [common.upstream_remote_address.socket_address for common in commons]

    assert [entry.request.request_id for entry in entries] == ["id-1", "id-2"]
    assert [f"{place.address}:{place.port_value}" for place in places] == [
        "10.0.0.1:8000",
        "10.0.0.2:8001",
    ]
    assert [
        common.metadata.filter_metadata["extproc.pick"].fields["id"].string_value
        for common in commons
    ] == ["a-1", "a-2"]


@pytest.mark.parametrize("body_bytes", [308, 200_000])
def test_each_request_that_is_driven_is_picked_for_and_ends_by_its_log_entry(
    body_bytes: int,
) -> None:
    load, steps = Load(num_pods=3, num_adapters=4, body_bytes=body_bytes), []

    def timed(step: str, function: Callable[[], Any]) -> Any:
        steps.append(step)
        return function()

    def drive(loop: DrivenLoop) -> tuple[int, str]:
        path = HotPath(load, loop)
        path.open()
        path.run(40, timed)
        page = generate_latest(path.parts.telemetry.registry).decode()
        return len(path.parts.routing.pool.flights), page

    in_flight, page = in_driven_loop(drive)

    assert in_flight == 0
    assert 'extproc_completions_total{outcome="completed"} 40.0' in page
    assert set(steps) == {step for step, _ in MEASURES.values()}


def test_every_measure_finds_what_it_measures_in_this_router() -> None:
    plan = Plan({"a": {"num_pods": 2, "num_adapters": 2}}, list(MEASURES), 8, 1)

    first, *found = in_driven_loop(lambda _loop: list(measured(plan)))

    assert first.measure == EMPTY
    assert [each.measure for each in found] == list(MEASURES)
    assert all(each.is_there and each.num_calls > 0 for each in found)


@pytest.mark.parametrize("name", STUBS)
def test_this_router_has_all_that_is_put_aside_for_its_price(name: str) -> None:
    replaced: list[str] = []

    class Spy(Watch):
        def replace(self, holder: Any, name: str, value: Any) -> None:
            assert getattr(holder, name) is not value
            replaced.append(name)

    def drive(loop: DrivenLoop) -> None:
        put_aside(Spy(Meter(), ""), HotPath(Load(num_pods=2, num_adapters=2), loop).parts, name)

    in_driven_loop(drive)

    assert replaced == [place.rpartition(".")[2].rpartition(":")[2] for place, _ in STUBS[name]]


@dataclass(frozen=True)
class Frozen:
    value: int

    def double(self) -> int:
        return 2 * self.value


@dataclass(slots=True)
class Slotted:
    value: int

    def twice(self) -> int:
        return self.once() + self.once()

    def once(self) -> int:
        return self.value


def test_a_call_within_a_measured_call_is_not_measured_again() -> None:
    meter, one = Meter(), Slotted(3)
    with Watch(meter, "wanted") as watch:
        assert watch.function(one, "twice")
        assert watch.function(one, "once")
        assert watch.timed("wanted", one.twice) == 6
        assert meter.num_calls == 1


def test_only_the_wanted_step_is_measured_and_all_is_as_before_afterwards() -> None:
    meter, frozen = Meter(), Frozen(2)
    before = vars(Frozen)["double"]
    with Watch(meter, "wanted") as watch:
        assert watch.function(frozen, "double")
        assert not watch.function(frozen, "missing")
        watch.replace(frozen, "value", 5)
        assert watch.timed("other", frozen.double) == 10
        assert meter.num_calls == 0
        assert watch.timed("wanted", frozen.double) == 10
        assert meter.num_calls == 1
        assert watch.whole("other", frozen.double) == 10
    assert vars(Frozen)["double"] is before
    assert frozen.value == 2


def test_what_others_call_of_a_stand_in_is_measured() -> None:
    meter = Meter()
    with Watch(meter, "wanted") as watch:
        stand_in = Proxy(watch, Slotted(1))
        assert watch.timed("wanted", lambda: stand_in.once() + stand_in.value) == 2
    assert meter.num_calls == 1


def test_callgrinds_files_are_read_in_their_order(tmp_path: Path) -> None:
    for number, total in ((1, 7), (2, 5), (10, 3)):
        text = f"events: Ir\nsummary: 1\n\ntotals: {total}\n"
        (tmp_path / f"counts.{number}").write_text(text)

    assert dumped(tmp_path / "counts") == [7, 5]


def test_what_measuring_costs_is_left_out_and_the_least_turn_counts() -> None:
    found = [
        Measured("", EMPTY, is_there=True, amount=100.0, num_calls=100),
        Measured("a", "request", is_there=True, amount=60.0, num_calls=20),
        Measured("a", "request", is_there=True, amount=40.0, num_calls=20),
        Measured("a", "route", is_there=False, amount=0.0, num_calls=0),
        Measured("a", EACH[0], is_there=True, amount=30.0, num_calls=10),
    ]

    assert checkouts.net(found, num_requests=10) == {
        ("a", "request"): 2.0,
        ("a", "route"): None,
        ("a", EACH[0]): 2.0,
    }


def test_what_a_checkout_lacks_counts_as_nothing_in_a_stage() -> None:
    terms = {"request": 1, "session": -1, "calls": 1}

    assert instructions.amount(FOUND, "a", terms) == 4.0
    assert instructions.amount(FOUND, "a", {"calls": 1}) is None


def test_stages_add_up_to_the_whole() -> None:
    """So that nothing is missing in the table, or counted twice."""
    stages, (total,) = [], [terms for name, terms in instructions.STAGES if "**" in name]
    for name, terms in instructions.STAGES:
        if "**" in name:
            break
        stages.append(terms)
    found = {
        name: summed
        for name in MEASURES
        if (summed := sum(terms.get(name, 0) for terms in stages)) != 0
    }

    assert found == total


def test_a_price_is_the_difference_to_everything_on() -> None:
    costs = {name: 6.0 for name in instructions.THINGS} | {instructions.ALL: 8.0}
    found: checkouts.Amounts = {(name, "request"): cost for name, cost in costs.items()}
    found |= {(name, measure): 1.0 for name in costs for measure in ("later", "log")}

    header, _, first, second, *_ = instructions.price_table({"us": found}).splitlines()

    assert header.split("|")[2:4] == ["   us ", "     % "]
    assert first.split() == ["|", *instructions.ALL.split(), "|", "10.0", "|", "100.0", "|"]
    assert second.split()[-4:] == ["2.0", "|", "20.0", "|"]


def test_a_checkouts_router_is_run_with_these_benchmarks(tmp_path: Path) -> None:
    package = tmp_path / "extproc" / "mine"
    package.mkdir(parents=True)
    (tmp_path / "extproc" / "__init__.py").touch()
    (package / "__init__.py").touch()
    script = "import bench, os; print(os.path.realpath(bench.__file__))"
    (package / "__main__.py").write_text(script)

    printed = checkouts.run(tmp_path, "extproc.mine")

    assert Path(printed.strip()) == checkouts.HERE / "bench" / "__init__.py"
    with pytest.raises(StackError, match="missing"):
        checkouts.run(tmp_path, "extproc.missing")


def test_without_valgrind_it_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")

    assert not checkouts.has_valgrind()
    assert "apt-get install valgrind" in capsys.readouterr().err
