"""docs/quickstart.md, typed: every command of it runs here, on free ports."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from extproc.stack.processes import free_port
from extproc.stack.stack import find_envoy
from tests.commandline import Command, commands, output_of
from tests.pages import blocks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def blocks_of(number: int) -> list[str]:
    """The shell blocks of a step."""
    (step,) = re.findall(rf"^## {number}\. (.*?)(?=^## )", PAGE, re.M | re.S)
    return blocks(str(step), "sh")


def type_it(folder: Path, script: str, **ports: object) -> str:
    """Run a block in a folder, with other ports, and return its output."""
    ours = f"{shlex.quote(sys.executable)} -m extproc "
    script = re.sub(r"^extproc ", ours, moved(script, ports), flags=re.M)
    path = f"{Path(find_envoy()).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PATH": path}
    return output_of("bash", "-e", "-c", script, cwd=folder, env=env)


def moved(script: str, ports: Mapping[str, object]) -> str:
    """A block with other ports."""
    for port, other in ports.items():
        script = re.sub(rf"\b{port.removeprefix('p')}\b", str(other), script)
    return script


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """A function that starts a command of the page."""
    with commands() as started:

        def make(*words: str) -> Command:
            started.append(Command(tmp_path, *words))
            return started[-1]

        yield make


def up(start: Callable[..., Command], line: str) -> tuple[Command, dict[str, object]]:
    """Start what `make up` does, and return its ports by those of the page."""
    (arguments,) = re.findall(r'^make up ARGS="(.*)"$', line, re.M)
    assert re.search(r"^up:.*\n\t\S+/extproc up \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.M)
    gateway = free_port()
    running = start("up", *shlex.split(arguments), "--port", str(gateway))
    running.wait_for_output("reply.choices")
    (admin,) = re.findall(r"live page +http://127.0.0.1:(\d+)/", running.output)
    (grpc,) = re.findall(r"watch 127.0.0.1:(\d+)", running.output)
    return running, {"p8080": gateway, "p9090": admin, "p9002": grpc}


def test_a_request_goes_to_the_pod_that_has_its_adapter_and_is_watched(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    (line,), (request,), (watch,) = blocks_of(1), blocks_of(2), blocks_of(3)
    _, ports = up(start, line)

    answers = [type_it(tmp_path, request, **ports) for _ in range(2)]
    command = moved(watch.splitlines()[-1], ports)
    watching = start(*shlex.split(command)[1:])
    watching.wait_for_output("customer-01")

    served = [re.findall(r"^x-served-by: (\S+)", each, re.M | re.I) for each in answers]
    assert all(each.startswith("HTTP/1.1 200") for each in answers)
    assert served[0] == served[1] != []
    assert f"127.0.0.1:{ports['p9090']}/" in moved(PAGE, ports)


def test_adapters_are_declared_from_the_folder_and_by_a_request(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    first, second = blocks_of(4)
    *making, line = first.splitlines()
    type_it(tmp_path, "\n".join(making))
    running, ports = up(start, line.replace("build/", f"{tmp_path}/build/"))
    output = type_it(tmp_path, second, **ports)

    assert re.search(r"declared +sql$", running.output, re.M)
    assert '"change":"created"' in output
    assert re.search(r"^HTTP/1.1 200", output[output.index("HTTP/1.1") :])


def test_a_router_that_is_killed_costs_no_request(
    tmp_path: Path, start: Callable[..., Command]
) -> None:
    pods, run, kill = blocks_of(5)
    first = free_port(2)
    gateway, router, metrics, admin, other, of_other = (free_port() for _ in range(6))
    ports = {
        **{"p8000": first, "p8001": first + 1, "p8080": gateway, "p9002": router},
        **{"p9003": other, "p9091": of_other},
    }
    start(*shlex.split(moved(pods, ports))[1:])
    (tmp_path / "build").mkdir()
    files, programs = re.split(r"^(?=extproc serve)", run, maxsplit=1, flags=re.M)
    # The ports that the page leaves to the defaults.
    own = f"server: {{address: 127.0.0.1:{router}}}\nadmin: {{address: 127.0.0.1:{metrics}}}\n"
    files += f"printf '{own}' >> build/one.yaml\nsed -i s/9901/{admin}/ build/envoy.yaml\n"

    # A reader takes longer than Envoy to find the second router healthy.
    stat = f"127.0.0.1:{admin}/stats?filter=cluster.router.membership_healthy"
    both = f"until curl -s '{stat}' | grep -q ': 2$'; do sleep 0.2; done\n"
    waits = f"{both}{until_served(8080)}"
    script = f"{until_served(8001)}{files}{programs}{waits}{kill}kill $other $envoy\n"
    output = type_it(tmp_path, script, **ports)

    assert output.startswith("HTTP/1.1 200")


def until_served(port: int) -> str:
    """A line that waits until requests for `sql` are answered at a port."""
    body = """-H 'content-type: application/json' -d '{"model": "sql", "prompt": "a"}'"""
    return f"until curl -sf 127.0.0.1:{port}/v1/completions {body} > answer; do sleep 0.2; done\n"
