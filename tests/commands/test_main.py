"""The command `extproc`: what each command prints, and how it ends."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shlex
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc import __version__
from extproc.commands.why import latest
from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, TlsFiles, render
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from extproc.observe.interpreter import interpreter
from tests.commandline import error_line, invoke, output_of, run
from tests.e2e.charts import EppProcess
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import RouterProcess, chat, free_port
from tests.fakepods import running_pod
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
OVERLAYS = ("envoy-gateway", "envoy-gateway-original-dst", "inference-pool")
COMMANDS = (
    *(
        "serve",
        "epp",
        "check-config",
        "envoy",
        "check-pod",
        "check-gateway",
        "watch",
        "why",
        "lab",
        "demo",
        "fake-pod",
    ),
    *("up", "adapters"),
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "extproc.yaml"
    path.write_text(
        "discovery: {static: ['10.0.0.7:8000']}\n"
        f"server: {{address: '127.0.0.1:{free_port()}'}}\n"
        f"admin: {{address: '127.0.0.1:{free_port()}'}}\n"
    )
    return path


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with running_pod(PodConfig(base_model="base", adapters=["a", "b"])) as running:
        yield running


# --- the command itself ----------------------------------------------------------------------


def test_without_a_command_it_shows_the_commands() -> None:
    listed = invoke().output

    assert all(command in listed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    result = invoke(command, "--help")

    assert result.exit_code == 0
    assert f"extproc {command}" in result.output


def test_commands_are_shown_in_four_groups() -> None:
    shown = invoke().output
    panels = re.split(r"─ (\w+) ─", shown)
    groups = {
        name: re.findall(r"^│ ([a-z-]+) ", text, flags=re.M)
        for name, text in zip(panels[1::2], panels[2::2], strict=True)
    }

    assert {name: found for name, found in groups.items() if name != "Options"} == {
        "Run": ["up", "demo", "serve", "epp", "envoy", "adapters"],
        "Check": ["check-config", "check-pod", "check-gateway"],
        "Observe": ["watch", "why"],
        "Measure": ["lab", "fake-pod"],
    }


@pytest.mark.parametrize(
    "command", [(), ("envoy",), ("watch",), ("lab", "run"), ("lab", "loadtest", "compare")]
)
def test_flags_are_shown_without_a_type(command: tuple[str, ...]) -> None:
    shown = invoke(*command, "--help").output

    assert "--help" in shown
    assert "bool" not in shown


def test_all_options_of_envoy_are_in_a_group() -> None:
    shown = invoke("envoy", "--help").output
    ungrouped = shown.split("─ Options ─")[1].split("╭")[0]

    assert re.findall(r"--[a-z-]+", ungrouped) == ["--help"]


def test_the_module_is_the_same_command() -> None:
    done = run(sys.executable, "-m", "extproc", "check-config", "--config", "/nonexistent")

    assert done.returncode == 2
    assert done.stderr.startswith("extproc: /nonexistent: cannot be read")


def test_the_version_is_that_of_the_package_and_of_the_interpreter() -> None:
    result = invoke("--version")

    python = f"Python {platform.python_version()}, compiler {interpreter()['compiler']}"
    assert (result.exit_code, result.stdout) == (0, f"extproc {__version__} ({python})\n")


@pytest.mark.parametrize(
    "page", [f"manifests/overlays/{name}/kustomization.yaml" for name in OVERLAYS]
)
def test_images_are_named_by_the_version(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")

    assert set(re.findall(r"\bnewTag: \"(\d[\d.]+)", text)) == {__version__}


@pytest.mark.parametrize(
    ("typed", "proposed"),
    [
        ("extproc check-", "check-config check-pod check-gateway"),
        ("extproc envoy --pr", "--preset"),
    ],
)
def test_completion_that_was_installed_completes_in_a_shell(
    tmp_path: Path, typed: str, proposed: str
) -> None:
    (tmp_path / "extproc").write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m extproc "$@"\n'
    )
    (tmp_path / "extproc").chmod(0o755)
    script = f"""
        extproc --install-completion >/dev/null
        . ~/.bashrc
        COMP_WORDS=({typed}) COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        $(complete -p extproc | sed 's/.*-F \\(\\S*\\).*/\\1/') extproc
        echo ${{COMPREPLY[@]}}
    """
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    assert output_of("bash", "-c", script, env=env).split() == proposed.split()


def test_what_serves_loads_nothing_of_the_laboratory() -> None:
    script = (
        "import sys, extproc.commands.main, extproc.commands.eppplan, extproc.service.app; "
        "print(*(name for name in sys.modules if name.startswith('extproc.')))"
    )
    rooms = {name.split(".")[1] for name in output_of(sys.executable, "-c", script).split()}

    assert "service" in rooms
    assert not rooms & {"lab", "stack"}


# --- serve -----------------------------------------------------------------------------------


async def test_serve_is_ready_until_a_signal_and_ends_well(pod: RunningPod) -> None:
    async with RouterProcess({"discovery": {"static": [pod.address]}}) as router:
        assert await router.admin_status("/healthz") == 200
        assert await router.stop() == 0


# --- check-config ----------------------------------------------------------------------------


def test_check_config_names_the_policy_of_a_good_file(config: Path) -> None:
    result = invoke("check-config", "--config", str(config))

    assert (result.exit_code, result.stdout) == (0, f"{config}: ok (policy least_harm)\n")


# --- envoy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_envoy_prints_the_configuration_of_a_mode(mode: Mode) -> None:
    result = invoke("envoy", "--mode", mode)

    assert (result.exit_code, result.stdout) == (0, render(BootstrapOptions(mode=mode)))


def test_the_founding_preset_is_one_destination_with_buffered_bodies() -> None:
    result = invoke("envoy", "--preset", "founding")

    assert result.stdout == invoke("envoy", "--mode", "original-dst", "--body", "buffered").stdout
    assert result.stdout == render(BootstrapOptions())


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--listen", "0.0.0.0:80"], {"listen": "0.0.0.0:80"}),
        (["--admin", "127.0.0.1:1"], {"admin": "127.0.0.1:1"}),
        (["--router", "a:1", "--router", "unix:/b"], {"routers": ("a:1", "unix:/b")}),
        (["--path", "/v1/score"], {"inference_paths": ("/v1/score",)}),
        (["--registration", "a:1", "--registration", "b:2"], {"registration": ("a:1", "b:2")}),
        (["--cors-origin", "*"], {"cors_origins": ("*",)}),
        (["--keep-request-id"], {"keep_request_ids": True}),
        (["--max-body-bytes", "5"], {"max_body_bytes": 5}),
        (["--message-timeout-s", "2.5"], {"message_timeout_s": 2.5}),
        (["--response-phases"], {"response_phases": True}),
        (["--no-response-phases"], {"response_phases": False}),
        (["--no-access-log"], {"access_log": False}),
        (["--fail-open"], {"failure_mode_allow": True}),
        (["--no-fail-open"], {"failure_mode_allow": False}),
        (["--allow-mode-override"], {"allow_mode_override": True}),
        (["--body", "headers-only"], {"request_body": BodyDelivery.HEADERS_ONLY}),
        (
            ["--mode", "override-host", "--pod", "10.0.0.7:8000"],
            {"mode": Mode.OVERRIDE_HOST, "static_pods": ("10.0.0.7:8000",)},
        ),
        (
            [*("--tls-ca", "ca", "--tls-cert", "c"), *("--tls-key", "k", "--tls-name", "n")],
            {"router_tls": TlsFiles("ca", "c", "k", "n")},
        ),
        (
            ["--pod-tls-ca", "ca", "--pod-tls-name", "pods"],
            {"pod_tls": TlsFiles("ca", server_name="pods")},
        ),
        (["--max-message-timeout-s", "60"], {"max_message_timeout_s": 60.0}),
        (["--flush-interval-s", "1"], {"access_log_flush_interval_s": 1.0}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_envoy_takes_over_each_option(arguments: list[str], options: dict[str, Any]) -> None:
    result = invoke("envoy", *arguments)

    assert result.exit_code == 0, result.stderr
    assert result.stdout == render(BootstrapOptions(**options))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "x"], "--mode x: allowed: original-dst, override-host, full-duplex"),
        (["--body", "x"], "--body x: allowed: buffered, "),
        (["--preset", "x"], "--preset x: allowed: founding"),
        (["--preset", "founding", "--body", "streamed"], "--preset founding is original-dst"),
        (["--preset", "founding", "--mode", "full-duplex"], "--preset founding is original-dst"),
        (["--listen", "nowhere"], "--listen nowhere: must be `host:port`"),
        (["--listen", "localhost:1"], "--listen localhost:1: must be `ip:port`: localhost is a"),
        (["--admin", "localhost:1"], "--admin localhost:1: must be `ip:port`: localhost is a"),
        (["--router", "http://a:1"], "--router http://a:1: must be `host:port`"),
        (["--router", "unix:"], "--router unix:: must be `unix:PATH`, the path of 1 to 107 bytes"),
        (["--router", f"unix:{'a' * 108}"], "must be `unix:PATH`, the path of 1 to 107 bytes"),
        (["--registration", "a"], "--registration a: must be `host:port`"),
        (["--path", "/v1/load_lora_adapter"], "--path: answered by this service"),
        (["--pod", "10.0.0.7:8000"], "--pod: in original-dst mode Envoy does not know the pods"),
        (
            ["--mode", "override-host", "--pod", "vllm:8000"],
            "--pod vllm:8000: must be `ip:port`: vllm is no IP address",
        ),
        (["--path", "v1/x"], "--path: not an inference path in normal form: 'v1/x'"),
        (["--tls-cert", "c", "--tls-key", "k"], "--tls-cert needs --tls-ca"),
        (["--tls-name", "n"], "--tls-name needs --tls-ca"),
        (["--tls-ca", "a", "--tls-cert", "c"], "--tls-cert needs --tls-key"),
        (["--tls-ca", "a", "--tls-key", "k"], "--tls-key needs --tls-cert"),
        (["--pod-tls-name", "n"], "--pod-tls-name needs --pod-tls-ca"),
    ],
)
def test_envoy_refuses_what_does_not_fit(arguments: list[str], message: str) -> None:
    assert message in error_line(invoke("envoy", *arguments))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--router-ping-s", "0"),
        ("--flush-interval-s", "0"),
        ("--message-timeout-s", "3601"),
        ("--max-message-timeout-s", "3601"),
        ("--request-timeout-s", "1e10"),
        ("--router-ping-s", "1e10"),
        ("--flush-interval-s", "inf"),
        ("--request-timeout-s", "nan"),
    ],
)
def test_envoy_refuses_times_that_envoy_would_not_take(option: str, value: str) -> None:
    assert_refused(option, value)


@pytest.mark.parametrize("option", ["--max-body-bytes", "--message-timeout-s"])
def test_envoy_refuses_limits_that_no_request_could_keep(option: str) -> None:
    assert_refused(option, "0")


def assert_refused(option: str, value: str) -> None:
    result = invoke("envoy", option, value)

    assert (result.exit_code, result.stdout) == (2, "")
    assert option in result.stderr


@pytest.mark.parametrize("option", ["--request-timeout-s", "--max-message-timeout-s"])
def test_envoy_takes_0_where_it_turns_a_limit_off(option: str) -> None:
    off: dict[str, Any] = {option.removeprefix("--").replace("-", "_"): 0.0}

    result = invoke("envoy", option, "0")

    assert result.exit_code == 0, result.stderr
    assert result.stdout == render(BootstrapOptions(**off))


# --- check-pod -------------------------------------------------------------------------------


async def test_check_pod_passes_a_server_that_has_what_it_needs(pod: RunningPod) -> None:
    result = await asyncio.to_thread(invoke, "check-pod", pod.url, "--adapter", "b")

    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.stdout
    assert result.stdout.startswith("pass  `GET /health` answers 200.")


async def test_check_pod_says_what_it_cannot_see(pod: RunningPod) -> None:
    vllm = await asyncio.to_thread(invoke, "check-pod", pod.url)
    sglang = await asyncio.to_thread(invoke, "check-pod", pod.url, "--engine", "sglang")

    lines = [line for line in vllm.stdout.splitlines() if line.startswith("set ")]
    assert ["pods.max_cpu_loras" in lines[0], "--max-cpu-loras" in lines[0]] == [True, True]
    assert ["pods.max_lora_rank" in lines[1], "--max-lora-rank" in lines[1]] == [True, True]
    assert "--max-loaded-loras" in sglang.stdout


async def test_check_pod_uses_the_key_in_the_file(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")
    async with running_pod(PodConfig(base_model="base", adapters=["a"], api_key="secret")) as pod:
        keyless = await asyncio.to_thread(invoke, "check-pod", pod.url)
        with_key = await asyncio.to_thread(
            invoke, "check-pod", pod.url, "--api-key-file", str(key_file)
        )

    assert keyless.exit_code == 1
    assert with_key.exit_code == 0, with_key.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "x"], "--engine x: allowed: sglang, vllm"),
        (["--api-key-file", "/nonexistent"], "--api-key-file /nonexistent: No such file"),
        (["--api-key-file", "/dev/null"], "--api-key-file /dev/null: not a regular file"),
        (["--api-key-file", __file__], f"--api-key-file {__file__}: must be one line"),
    ],
)
def test_check_pod_refuses_wrong_options(arguments: list[str], message: str) -> None:
    assert message in error_line(invoke("check-pod", "http://127.0.0.1:1", *arguments))


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "10.0.0.7", "grpc://a:1", "http://["])
@pytest.mark.parametrize("command", [["check-pod"], ["lab", "calibrate"]])
def test_what_is_no_url_of_a_server_is_refused(command: list[str], url: str) -> None:
    result = invoke(*command, url)

    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not an http:// or https:// URL" in result.stderr


def test_check_pod_names_the_file_without_certificates() -> None:
    line = error_line(invoke("check-pod", "https://127.0.0.1:1", "--ca-file", __file__))

    assert line.startswith(f"--ca-file {__file__}: ")


# --- watch -----------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_watch_prints_decisions_as_they_fall(pod: RunningPod) -> None:
    discovery = {"static": [{"address": pod.address, "name": "the-pod"}]}
    async with (
        RouterProcess({"discovery": discovery}) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "extproc", "watch", router.address, "--last", "5"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            await _post(f"{envoy.url}/v1/chat/completions", chat("a"))
            line = (await process.stdout.readline()).decode()
        finally:
            process.terminate()
            await process.communicate()

    assert re.search(r"a  ->  the-pod  least_harm/", line)


async def _post(url: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as got:
        assert got.status == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is not host:port"),
        (["127.0.0.1:1"], "127.0.0.1:1"),
        (["127.0.0.1:1", "--tls-ca", "/nonexistent"], "No such file"),
        (["127.0.0.1:1", "--tls-cert", "/nonexistent"], "/nonexistent: No such file"),
        (["127.0.0.1:1", "--tls-ca", __file__], f"{__file__}: there is no certificate in it"),
        (["127.0.0.1:1", "--tls-key", "k"], "--tls-key needs --tls-cert"),
        (["127.0.0.1:1", "--tls-insecure", "--tls-ca", "a"], "leave out --tls-ca"),
    ],
)
def test_watch_says_why_it_can_not(arguments: list[str], message: str) -> None:
    assert message in error_line(invoke("watch", *arguments))


@pytest.mark.e2e
async def test_watch_takes_the_certificate_of_a_router_s_own_making_where_it_is_told_to() -> None:
    async with EppProcess({"discovery": {"static": []}}) as router:

        async def said(*options: str) -> str:
            command = ("watch", router.address, *options, "--request", "nobody")
            done = await asyncio.to_thread(run, sys.executable, "-m", "extproc", *command)
            return done.stderr

        assert "no decision about nobody is known here" in await said("--tls-insecure")
        assert "certificate refused" in await said("--tls")


# --- why -------------------------------------------------------------------------------------


@pytest.mark.e2e
async def test_why_tells_what_a_router_keeps_of_a_model(pod: RunningPod) -> None:
    discovery = {"static": [{"address": pod.address, "name": "the-pod"}]}
    async with (
        RouterProcess({"discovery": discovery}) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        await _post(f"{envoy.url}/v1/chat/completions", chat("a"))
        await eventually(router.has_none_in_flight)
        router.change_config(queue={"max_requests": 50})
        await eventually(lambda: router.counter("extproc_config_applied_timestamp_seconds"))
        command = (sys.executable, "-m", "extproc", "why", "a", "--admin", router.admin_url)
        said = await asyncio.to_thread(output_of, *command)

    assert re.search(r"first token .* of 1  \(before: unknown\)", said)
    assert "the-pod 1" in said
    assert re.search(r"^Also: the configuration changed at \d\d:\d\d:\d\d\.$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--admin", "nowhere"], "'nowhere' is not an http:// or https:// URL"),
        (["--admin", "http://127.0.0.1:1"], "http://127.0.0.1:1: Cannot connect"),
        (["--since", "26:00"], "--since 26:00: must be a time of day, as 02:40 or 02:40:30"),
        (["--since", "02:40+05:00"], "--since 02:40+05:00: must be a time of day"),
        (["--since", "02"], "--since 02: must be a time of day"),
    ],
)
def test_why_says_why_it_can_not(arguments: list[str], message: str) -> None:
    result = invoke("why", "a", *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_time_of_day_is_the_last_that_a_clock_showed() -> None:
    now = datetime.now().astimezone()

    for text in ("00:00", "2:40", "12:30:15", "23:59:59"):
        assert timedelta(0) <= now - latest(text) < timedelta(days=1, minutes=1)


def test_the_laboratory_explains_itself() -> None:
    result = invoke("lab")

    assert result.exit_code == 0, result.stderr
    assert "report" in result.stdout
    assert "SUITE" in invoke("lab", "run", "--help").stdout.upper()


def test_the_laboratory_names_what_it_cannot_use(config: Path) -> None:
    report = invoke("lab", "report", str(config))
    jobs = invoke("lab", "run", "quick", "--jobs", "-1")

    assert (report.exit_code, jobs.exit_code) == (1, 2)
    assert report.stderr.startswith(f"extproc: {config}: JSON is malformed")
    assert "--jobs" in jobs.stderr


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_of_a_configuration_that_may_not_be_read_one_learns_whose_it_is(
    command: str, unreadable: Path
) -> None:
    line = error_line(invoke(command, "--config", str(unreadable)))

    assert f"{unreadable}: cannot be read: Permission denied: its mode is 0000" in line
