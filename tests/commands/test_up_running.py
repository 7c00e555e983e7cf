"""`extproc up` as a process: what it serves, how it ends, and what stays: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.files.tls import server_context
from extproc.lab.fakepod.podserver import PodConfig, build_app, start_pod
from extproc.stack.processes import free_port, get_page
from tests.adapters.test_adapterfiles import write as write_adapter
from tests.commandline import Command, commands, error_line, invoke, output_of, snippets
from tests.fakepods import running_pod
from tests.pki import Pki
from tests.servers import serving_app
from tests.waiting import eventually

slow = pytest.mark.timeout(180)
POLICY_THAT_WARNS = """
import logging
from extproc.routing.policies import RoundRobin as Told
logging.getLogger("told").warning("look here")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that starts the command on a free port."""
    with commands() as started:

        def make(*arguments: str, **more: Any) -> Command:
            command = Command(tmp_path, "up", "--port", str(free_port()), *arguments, **more)
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


def kill(command: Command, pattern: str) -> None:
    """Kill the one process whose command line has the pattern."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in command.processes()}
    (pid,) = (pid for pid, line in lines.items() if re.search(pattern, line))
    os.kill(pid, signal.SIGKILL)


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

    (router,) = tmp_path.glob("extproc-router-*/config.yaml")
    (pod,) = tmp_path.glob("extproc-pod-1-*/pod.json")
    told = yaml.safe_load(router.read_text())["pods"]["max_cpu_loras"]
    assert told == yaml.safe_load(pod.read_text())["max_cpu_loras"]
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
    # A second Envoy could listen there, too: Envoy shares its ports.
    port = request[1].split(":")[2].partition("/")[0]
    refused = await asyncio.to_thread(invoke, "up", "--pod", "127.0.0.1:1", "--port", port)
    assert "already in use" in error_line(refused)

    up.process.send_signal(signal.SIGINT)
    assert await ended(up) == 0, up.output
    assert list(tmp_path.glob("extproc-*")) == []


@pytest.mark.e2e
@slow
async def test_what_lies_in_a_folder_is_declared_and_more_can_be_by_the_printed_command(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    folder = tmp_path / "the adapters"
    for name in ("sql", "law"):
        write_adapter(folder / name)
    (folder / "no adapter").mkdir()
    up = start("--fake-pods", "1", "--adapters", str(folder))
    await wait_for(up, "reply.choices")
    write_adapter(folder / "NAME")
    declare = up.output.split("pods have it\n")[1].split("\n\n")[0]
    made = json.loads(await asyncio.to_thread(output_of, "bash", "-c", f"{declare} -s"))
    url = re.search(r"curl (\S+/completions)", up.output)
    assert url
    served = {}
    async with aiohttp.ClientSession() as http:
        for name in ("sql", "NAME"):
            body = {"model": name, "prompt": "hi", "max_tokens": 1}
            async with http.post(url[1], json=body) as response:
                served[name] = response.status
    up.process.send_signal(signal.SIGINT)
    assert await ended(up) == 0, up.output

    assert "declared    law, sql\n" in up.output
    assert (made["change"], made["status"]["state"]) == ("created", "ready")
    assert served == {"sql": 200, "NAME": 200}
    assert (folder / ".extproc/token").stat().st_mode & 0o77 == 0

    again = start("--fake-pods", "1", "--adapters", str(folder))
    await wait_for(again, "reply.choices")
    assert "declared  " not in again.output
    assert "NAME" in again.output.split("models")[1].split("\n")[0]


@pytest.mark.e2e
@slow
async def test_its_snippets_work_with_a_key_and_a_model_that_the_pods_list(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl on PATH (Debian package curl)")
    key = tmp_path / "the key"
    key.write_text("secret\n")
    async with pods("it's 'quoted' \\ ü", api_key="secret", count=2) as addresses:
        given = [word for address in addresses for word in ("--pod", f"http://{address}")]
        up = start(*given, "--api-key-file", str(key), "--policy", "round_robin")
        await wait_for(up, "reply.choices")
        shell, python = snippets(up.output)

        from_shell = await asyncio.to_thread(
            output_of, "sh", "-c", shell.replace("curl ", "curl --silent ")
        )
        from_python = await asyncio.to_thread(output_of, sys.executable, "-c", python)

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

    (cause,) = re.findall(rf"^{dead} does not list its models: (.+)$", up.output, flags=re.M)
    assert "connect" in cause.lower()
    assert f"{address} does not list" not in up.output
    assert '"model": "sql"' in up.output


@pytest.mark.long
@pytest.mark.e2e
@slow
async def test_if_no_pod_answers_it_waits_for_one(start: Callable[..., Command]) -> None:
    port = free_port()
    up = start("--pod", f"127.0.0.1:{port}")
    await wait_for(up, "no pod answers yet: waiting for one")
    assert "in Python" not in up.output

    async with running_pod(PodConfig(adapters=["late"]), port=port):
        await wait_for(up, '"model": "late"')
    assert up.output.count("no pod answers yet") == 1


@pytest.mark.e2e
@slow
async def test_what_the_router_warned_of_while_it_started_is_shown(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    (tmp_path / "told.py").write_text(POLICY_THAT_WARNS)
    async with pods("sql") as [address]:
        up = start("--pod", address, "--policy", "told:Told", env={"PYTHONPATH": str(tmp_path)})
        await wait_for(up, "reply.choices")

    assert re.search("^router: .* WARNING +told: look here$", up.output, flags=re.M)
    assert "serving on" not in up.output


@pytest.mark.long
@pytest.mark.e2e
@slow
async def test_two_that_start_at_once_run_side_by_side(start: Callable[..., Command]) -> None:
    both = [start("--pod", f"127.0.0.1:{free_port()}") for _ in range(2)]
    for up in both:
        await wait_for(up, "no pod answers yet")

    places = [re.findall(r"(?:live page|decisions) +.*", up.output) for up in both]
    assert len({*places[0], *places[1]}) == 4
    assert [up.process.poll() for up in both] == [None, None]


@pytest.mark.e2e
@slow
async def test_it_ends_in_order_with_its_terminal(start: Callable[..., Command]) -> None:
    terminal, theirs = os.openpty()
    up = start("--pod", f"127.0.0.1:{free_port()}", stdout=theirs)
    os.close(theirs)
    await wait_for(up, "no pod answers yet")

    os.close(terminal)
    up.process.send_signal(signal.SIGHUP)
    assert await ended(up) == 0, up.output


@pytest.mark.long
@pytest.mark.e2e
@slow
async def test_it_serves_pods_with_certificates(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    pki = Pki(tmp_path)
    context = server_context(*pki.issue("pod", "127.0.0.1"))
    async with serving_app(build_app(PodConfig(adapters=["sql"])), tls=context) as url:
        up = start("--pod", url, "--ca-file", str(pki.ca))
        await wait_for(up, "reply.choices")

        assert "pod-1 says sql:" in await asyncio.to_thread(
            output_of, sys.executable, "-c", snippets(up.output)[1]
        )


@pytest.mark.e2e
@slow
async def test_several_routers_serve_requests_and_tell_each_other_of_them(
    start: Callable[..., Command],
) -> None:
    async with pods("sql") as [address]:
        up = start("--pod", address, "--routers", "2")
        await wait_for(up, "reply.choices")
        request = re.search(r"curl (\S+/completions)", up.output)
        assert request
        url, body = request[1], {"model": "sql", "prompt": "hi", "max_tokens": 1}
        admins = re.findall(r"live page +(\S+)/", up.output)
        targets = re.findall(r"decisions +.* watch (\S+)", up.output)
        assert (len({*admins}), len({*targets})) == (2, 2)

        async with aiohttp.ClientSession() as http:

            async def all_have_heard_of_picks() -> bool:
                async with http.post(url, json=body) as response:
                    assert response.status == 200
                pages = [await get_page(f"{admin}/metrics") for admin in admins]
                heard = r'^extproc_told_picks_total\{direction="in"\} [1-9]'
                return all(re.search(heard, page or "", re.M) for page in pages)

            await eventually(all_have_heard_of_picks)

    kill(up, "router-2-")
    assert await ended(up) == 1
    assert "router-2: ended with status -9" in up.output


@pytest.mark.few(1)
@pytest.mark.e2e
@slow
@pytest.mark.parametrize("program", ["serve", "envoy.yaml"], ids=["router", "envoy"])
async def test_if_a_process_dies_it_says_so_with_its_log_and_ends(
    program: str, start: Callable[..., Command]
) -> None:
    async with pods("sql") as [address]:
        up = start("--pod", address)
        await wait_for(up, "reply.choices")
        kill(up, program)
        assert await ended(up) == 1
    name = "router" if program == "serve" else "envoy"
    said = up.output.split("# Ctrl-C")[1]
    assert f"{name}: ended with status -9" in said
    assert "serving on" in said or name == "envoy"


@pytest.mark.few(1)
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
