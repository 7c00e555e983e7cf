"""The command `extproc fake-pod` as a process."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from extproc.lab.engine.profiles import INSTANT, PROFILES, as_yaml
from extproc.lab.fakepod import podserver
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.stack.processes import free_port
from tests.commandline import error_line, invoke, run
from tests.servers import needs_ipv6

FREE = ("--port", "0")


@dataclass
class Pods:
    """Running pods: their process, and the lines that it printed."""

    process: asyncio.subprocess.Process
    lines: list[str]

    @property
    def urls(self) -> list[str]:
        return [re.findall(r"http://[\d.:]+", line)[0] for line in self.lines]


@asynccontextmanager
async def fake_pods(*options: str, count: int = 1) -> AsyncIterator[Pods]:
    """Pods in a process; ended by SIGTERM if it has not ended yet."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "fake-pod", "--count", str(count), *options),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield Pods(process, [(await process.stdout.readline()).decode() for _ in range(count)])
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.stdout.read()

    assert await process.wait() == 0


async def ask(http: aiohttp.ClientSession, model: str, **more: Any) -> tuple[int, Any]:
    body = {"model": model, "prompt": "hi", "max_tokens": 1, **more}
    async with http.post("/v1/completions", json=body) as response:
        return response.status, await response.json()


async def status(http: aiohttp.ClientSession, path: str) -> int:
    async with http.get(path) as response:
        return response.status


async def models(http: aiohttp.ClientSession) -> dict[str, str]:
    """Return the path of each model."""
    async with http.get("/v1/models") as response:
        return {card["id"]: card["root"] for card in (await response.json())["data"]}


async def test_a_pod_says_where_it_is_and_what_it_serves_and_ends_on_sigterm() -> None:
    options = ("--name", "pod-9", "--adapter", "x,y", "--adapter", "z")
    async with fake_pods(*FREE, *options) as pods:
        (line,) = pods.lines
        assert line == f"pod-9 listens on {pods.urls[0]} and serves: base, x, y, z\n"
        async with aiohttp.ClientSession(pods.urls[0]) as http:
            assert list(await models(http)) == ["base", "x", "y", "z"]
            _, body = await ask(http, "z")
            assert body["choices"][0]["text"] == "pod-9 says z:"


async def test_several_pods_have_consecutive_ports_and_names_of_their_own() -> None:
    port = free_port(2)
    async with fake_pods("--port", str(port), count=2) as pods:
        assert pods.urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        names = []
        for url in pods.urls:
            async with aiohttp.ClientSession(url) as http, http.get("/health") as response:
                names.append(response.headers["x-served-by"])

    assert names == [f"pod-{port}", f"pod-{port + 1}"]


async def test_a_pod_that_drains_says_so_and_serves_what_comes_and_what_runs() -> None:
    async with (
        fake_pods(*FREE, "--drain-s", "2") as pods,
        aiohttp.ClientSession(pods.urls[0]) as http,
    ):
        running = {"model": "base", "prompt": "hi", "max_tokens": 200, "stream": True}
        async with http.post("/v1/completions", json=running) as response:
            await response.content.readline()
            pods.process.send_signal(signal.SIGTERM)
            while (await status(http, "/health")) == 200:
                await asyncio.sleep(0.01)
            assert await status(http, "/metrics") == 503
            assert await status(http, "/metrics/?name[]=vllm:num_requests_running") == 503
            assert (await ask(http, "base"))[0] == 200
            assert (await response.text()).endswith("data: [DONE]\n\n")
        assert await pods.process.wait() == 0


@pytest.mark.parametrize("first", [(), (signal.SIGTERM,)], ids=["serving", "draining"])
async def test_ctrl_c_does_not_wait_for_a_drain(first: tuple[signal.Signals, ...]) -> None:
    async with (
        fake_pods(*FREE, "--drain-s", "1000") as pods,
        aiohttp.ClientSession(pods.urls[0]) as http,
    ):
        running = {"model": "base", "prompt": "hi", "max_tokens": 8000, "stream": True}
        async with http.post("/v1/completions", json=running) as response:
            await response.content.readline()
            for number in first:
                pods.process.send_signal(number)
                while (await status(http, "/health")) == 200:
                    await asyncio.sleep(0.01)
            pods.process.send_signal(signal.SIGINT)
            assert await pods.process.wait() == 0


@needs_ipv6
async def test_a_pod_on_an_ipv6_address_says_where_it_is() -> None:
    async with fake_pods(*FREE, "--host", "::1") as pods:
        url = re.findall(r"http://\S+", pods.lines[0])[0]
        async with aiohttp.ClientSession(url) as http:
            assert await status(http, "/health") == 200


def configs_of(monkeypatch: pytest.MonkeyPatch, *options: str) -> list[PodConfig]:
    """What the pods of these options would run with."""
    made: list[PodConfig] = []
    monkeypatch.setattr(podserver, "run_pods", lambda configs, *_, **__: made.extend(configs))
    result = invoke("fake-pod", *options)
    assert result.exit_code == 0, result.output
    return made


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ([], {}),
        (["--name", "x"], {"name": "x"}),
        (["--port", "0"], {"name": "pod-1"}),
        (["--base-model", "b"], {"base_model": "b"}),
        (["--adapter", "x,y", "--adapter", "z"], {"adapters": ["x", "y", "z"]}),
        (["--max-loras", "2", "--max-cpu-loras", "3"], {"max_loras": 2, "max_cpu_loras": 3}),
        (["--max-lora-rank", "32"], {"max_lora_rank": 32}),
        (
            ["--adapter-rank", "a=b=16,c=8", "--adapter-rank", "d=1"],
            {"ranks_by_name": {"a=b": 16, "c": 8, "d": 1}},
        ),
        (["--profile", "instant"], {"profile": INSTANT}),
        (["--api-key", "secret"], {"api_key": "secret"}),
        (["--drain-s", "2.5"], {"drain_s": 2.5}),
    ],
    ids=lambda value: value[0] if value and isinstance(value, list) else "",
)
def test_a_pod_is_what_each_option_says(
    options: list[str], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults: dict[str, Any] = {
        "name": "pod-8000", "base_model": "base", "adapters": [], "max_loras": 4,
        "max_lora_rank": 16, "ranks_by_name": {}, "profile": PROFILES["a100-8b"],
    }  # fmt: skip

    assert configs_of(monkeypatch, *options) == [PodConfig(**defaults | fields)]


def test_several_pods_of_a_name_have_a_number_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = configs_of(monkeypatch, "--name", "x", "--count", "2")

    assert [each.name for each in made] == ["x-1", "x-2"]


def test_a_pod_of_the_stack_takes_its_whole_configuration_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = replace(INSTANT, name="made up", max_num_seqs=3)
    config = PodConfig("pod-8", adapters={"a": "/a"}, ranks_by_path={"/a": 8}, profile=profile)
    path = tmp_path / "pod.json"
    path.write_bytes(msgspec.json.encode(config))

    assert configs_of(monkeypatch, *FREE, "--config", str(path)) == [config]


def test_the_profile_is_that_of_a_calibration_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(as_yaml(replace(INSTANT, max_model_len=99)))
    [made] = configs_of(monkeypatch, *FREE, "--profile", str(path))

    assert (made.profile.name, made.profile.max_model_len) == ("mine", 99)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profile", "h1000"], "--profile h1000: allowed: .*a100-8b"),
        (["--profile", "/nonexistent.yaml"], "--profile /nonexistent.yaml: .*No such file"),
        (["--adapter", "a,b,a"], "--adapter a: another model has this name"),
        (["--adapter", "base"], "--adapter base: another model has this name"),
        (["--port", "65535", "--count", "2"], "--count 2: there are not so many ports from 65535"),
        (["--max-loras", "0", "--adapter", "a", *FREE], "--max-loras 0: .*--adapter"),
        (["--max-cpu-loras", "2", *FREE], "--max-cpu-loras 2: must be at least --max-loras"),
        (["--adapter-rank", "a", *FREE], "--adapter-rank a: must be NAME=RANK"),
        (["--adapter-rank", "a=0", *FREE], "--adapter-rank a=0: must be NAME=RANK"),
        (["--adapter", "a", "--adapter-rank", "a=64", *FREE], ".*LoRA rank 64 is greater than"),
        (["--name", "a\nb", *FREE], r"--name 'a\\nb': must be printable ASCII"),
        (["--base-model", "", *FREE], "--base-model '': no request can name it"),
        (["--api-key", "", *FREE], "--api-key: must be printable ASCII, and not empty"),
        (["--api-key", "\xe9", *FREE], "--api-key: must be printable ASCII, and not empty"),
        (["--drain-s", "inf", *FREE], "--drain-s inf: must be a number of seconds"),
        (["--host", "no.invalid", *FREE], "--host no.invalid: "),
        (["--host", "192.0.2.1", *FREE], "--host 192.0.2.1: "),
    ],
)
def test_options_that_make_no_pod_are_refused_on_one_line(options: list[str], message: str) -> None:
    line = error_line(invoke("fake-pod", *options))

    assert re.match(message, line), line


async def test_a_port_in_use_is_refused_and_no_pod_stays() -> None:
    taken = await start_pod(PodConfig(), port=free_port())
    port = int(taken.address.rpartition(":")[2])
    try:
        command = ("fake-pod", "--count", "2", "--port", str(port - 1))
        done = await asyncio.to_thread(run, sys.executable, "-m", "extproc", *command)
    finally:
        await taken.stop()

    assert done.returncode == 2
    assert done.stderr.startswith(f"extproc: --port {port - 1}: ")
    assert f"{port}" in done.stderr
    assert "already in use" in done.stderr
