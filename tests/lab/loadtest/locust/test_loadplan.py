"""From options to a plan, and a plan's shares."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.lab.loadtest.locust.loadplan import LocustPlan, LoopThread, add_options, make_plan
from extproc.lab.trials.suites import PlanError
from extproc.lab.workload.exchange import CHAT


class Parser(ArgumentParser):
    """Takes what locust's parser does beside argparse's."""

    def add_argument(self, *names: str, **kwargs: Any) -> Any:
        for name in ("env_var", "is_secret", "include_in_web_ui"):
            kwargs.pop(name, None)
        return super().add_argument(*names, **kwargs)


def options(*arguments: str) -> Namespace:
    parser: Any = Parser()
    add_options(parser)
    found: Namespace = parser.parse_args(arguments)
    return found


def plan(url: str, *arguments: str, workers: tuple[str, ...] = ("w1",)) -> LocustPlan:
    return make_plan(options(*arguments), url, workers=workers)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = PodConfig(base_model="base-7b", adapters=["x", "y"], api_key="secret")
    with closing(LoopThread()) as thread:
        pod = thread.wait(lambda: start_pod(config))
        yield pod.url
        thread.wait(pod.stop)


@contextmanager
def listing(content: object) -> Iterator[str]:
    """The URL of a server that answers every request with this, from a thread of its own."""

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response(content)

    async def start() -> web.ServerRunner:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    with closing(LoopThread()) as thread:
        runner = thread.wait(start)
        yield "http://{}:{}".format(*runner.addresses[0])
        thread.wait(runner.cleanup)


KEY = ("--api-key", "secret")


def test_adapters_and_base_model_are_those_that_the_endpoint_lists(url: str) -> None:
    made = plan(url, *KEY)

    assert (made.base_model, made.listed) == ("base-7b", ("x", "y"))
    assert set(made.make_workload().adapters) == {"x", "y"}
    assert made.settings.headers == {"Authorization": "Bearer secret"}


def test_names_can_stay_as_they_are(url: str) -> None:
    made = plan(url, *KEY, "--adapter-names", "as-is", "--adapters", "3")

    assert made.listed is None
    assert sorted(made.make_workload().adapters) == [f"adapter-000{n}" for n in range(3)]


def test_with_own_names_and_a_model_nothing_is_fetched() -> None:
    made = plan("http://127.0.0.1:1", "--adapter-names", "as-is", "--model", "m")

    assert made.base_model == "m"


def test_an_endpoint_without_adapters_lends_the_names_of_its_models() -> None:
    with listing({"data": [{"id": "gpt"}, {"id": "gpt-mini", "parent": None}]}) as url:
        made = plan(url)

    assert (made.base_model, made.listed) == ("gpt", ("gpt", "gpt-mini"))


def test_the_form_follows_the_options(url: str) -> None:
    form = plan(url, *KEY, "--api", "chat", "--ignore-eos", "--model", "mine").form

    assert (form.path, form.base_model) == (CHAT, "mine")
    assert form.extra == (("ignore_eos", True),)


def test_a_plan_survives_the_way_to_a_worker(url: str) -> None:
    made = plan(url, *KEY, workers=("w1", "w2"))

    assert msgspec.convert(msgspec.to_builtins(made), type=LocustPlan) == made


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_shares_are_the_whole_workload_each_request_once(url: str, num_workers: int) -> None:
    workers = tuple(f"w{n}" for n in range(num_workers))
    made = plan(url, *KEY, "--requests", "50", workers=workers)
    workload = made.make_workload()

    shares = [list(made.share(workload, place)) for place in range(num_workers)]

    assert sorted(each for share in shares for each in share) == list(enumerate(workload.arrivals))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--timeout", "0"), "$.timeout"),
        (("--slo-ttft", "-1"), "$.slo_ttft"),
        (("--rate", "-1"), "$.rate"),
        ((), "status 401"),
    ],
)
def test_an_invalid_option_is_an_error_of_one_line(
    url: str, arguments: tuple[str, ...], says: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(url, *arguments)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"data": []}, "lists nothing"),
        ({"models": []}, "missing required field"),
        ([1], "Expected"),
    ],
)
def test_an_endpoint_without_models_is_an_error(
    answer: Mapping[str, Any] | list[int], says: str
) -> None:
    with listing(answer) as url, pytest.raises(PlanError, match=says):
        plan(url)


def test_a_missing_endpoint_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"127\.0\.0\.1:1"):
        plan("http://127.0.0.1:1")
    with pytest.raises(PlanError, match="--host: '' is not"):
        plan("")


def test_an_unknown_workload_is_an_error(url: str) -> None:
    with pytest.raises(PlanError, match="no workload 'nope'"):
        plan(url, *KEY, "--workload", "nope").make_workload()
