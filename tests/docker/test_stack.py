"""docker-compose.yml on a real Docker engine: started, used, scaled and taken down.

`make test-docker` runs it, where an engine runs or can be started (tests/docker/engine.py).
Grafana, locust and the real vLLM are left out: tests/compose has what can be told without an image.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.compose.files import COMPOSE, FILES, ROOT, services
from tests.docker.engine import Project, need_engine, service_of
from tests.e2e.harness import Client
from tests.waiting import eventually

pytestmark = [
    pytest.mark.docker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1200),
]
VERSION = "test"
NUM_PODS = 8
NUMBERS = {"gateway": 1, "router": 1, "pods": NUM_PODS, "prometheus": 1}
ADAPTERS = services()["pods"]["environment"]["ADAPTERS"].split(",")
REQUESTS_PER_S = 20
NUM_REQUESTS = 40 * REQUESTS_PER_S
SCALED_AFTER = 8 * REQUESTS_PER_S


@pytest.fixture(scope="module")
def image() -> None:
    """Build our image. It stays, so that the next build reuses its layers."""
    need_engine()
    Project(ROOT, VERSION).compose("build", "router")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def project(image: None) -> AsyncIterator[Project]:
    """The services without a profile except Grafana, all healthy."""
    made = Project(ROOT, VERSION, fake_pods=NUM_PODS)
    try:
        await made.up([*NUMBERS])
        await made.healthy(NUMBERS)
        yield made
    finally:
        made.down()
    assert made.remains() == []


@pytest_asyncio.fixture(loop_scope="module")
async def client(project: Project) -> AsyncIterator[Client]:
    """A client of the gateway, once that lists every adapter."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        found = Client(f"http://127.0.0.1:{project.gateway_port}", http)

        async def lists_all() -> bool:
            answer = await found.request("GET", "/v1/models")
            return answer.status == 200 and {*ADAPTERS} <= {
                card["id"] for card in answer.json["data"]
            }

        await eventually(lists_all, within_s=60)
        yield found


async def test_pods_serve_their_adapters_in_every_api(project: Project, client: Client) -> None:
    hosts = {each["Config"]["Hostname"] for each in project.containers("pods")}
    for adapter in ADAPTERS:
        answer = await client.chat(adapter)
        assert answer.status == 200
        assert answer.json["model"] == adapter
        assert answer.served_by in hosts

    body = json.dumps({"model": ADAPTERS[0], "input": "hi", "max_output_tokens": 2}).encode()
    answer = await client.request("POST", "/v1/responses", body)
    assert answer.status == 200
    assert answer.json["object"] == "response"


async def test_containers_have_the_rights_that_the_file_gives_them(project: Project) -> None:
    for container in project.containers():
        wanted, host = services()[service_of(container)], container["HostConfig"]
        assert host["ReadonlyRootfs"] is wanted["read_only"] is True
        assert host["CapDrop"] == wanted["cap_drop"] == ["ALL"]
        assert host["SecurityOpt"] == wanted["security_opt"]
        assert all(mount["RW"] is False for mount in container["Mounts"] if mount["Type"] == "bind")
    for service in NUMBERS:
        assert project.inside(service, "id", "-u").stdout.strip() not in ("", "0")
        for folder in ("/", "/tmp", "/etc"):
            refused = project.inside(service, "sh", "-c", f"echo x > {folder}/written")
            assert "Read-only file system" in refused.stderr


async def test_only_the_gateway_has_a_port_on_the_host_the_one_that_was_chosen(
    project: Project,
) -> None:
    published = {
        service_of(each): [
            (port["HostIp"], int(port["HostPort"]))
            for ports in each["NetworkSettings"]["Ports"].values()
            for port in ports or ()
        ]
        for each in project.containers()
    }

    assert published.pop("gateway") == [("127.0.0.1", project.gateway_port)]
    assert published == {name: [] for name in NUMBERS if name != "gateway"}


async def test_prometheus_finds_the_router_and_every_pod(project: Project) -> None:
    async def all_are_up() -> bool:
        command = ("wget", "-q", "-O", "-", "http://127.0.0.1:9090/api/v1/targets")
        page = project.inside("prometheus", *command).stdout
        targets = json.loads(page)["data"]["activeTargets"] if page else []
        up = Counter(each["labels"]["job"] for each in targets if each["health"] == "up")
        return up == {"extproc": 1, "vllm": NUM_PODS}

    await eventually(all_are_up, within_s=120, every_s=1)


async def test_without_the_router_nothing_is_served_and_no_request_is_logged(
    project: Project, client: Client
) -> None:
    project.compose("kill", "router")
    try:
        answers = [await client.chat(adapter) for adapter in ADAPTERS]
        assert {(answer.status, answer.error_code) for answer in answers} == {
            (503, "router_unavailable")
        }
        log = project.logs("gateway")
        assert "StreamEndpoints gRPC config stream to router closed" in log
        assert "ext_proc.cc" not in log
    finally:
        project.compose("start", "router")
    await project.healthy(NUMBERS)


async def test_no_request_is_lost_when_six_of_eight_pods_are_removed_under_load(
    project: Project, client: Client
) -> None:
    scaled: asyncio.Task[None] | None = None
    under_way: list[asyncio.Task[Any]] = []
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    for number in range(NUM_REQUESTS):
        await asyncio.sleep(begun_s + number / REQUESTS_PER_S - loop.time())
        under_way.append(
            loop.create_task(client.chat(ADAPTERS[number % len(ADAPTERS)], max_tokens=16))
        )
        if number == SCALED_AFTER:
            scaled = loop.create_task(project.up([*NUMBERS], FAKE_PODS="2"))
    answers = await asyncio.gather(*under_way)
    assert scaled is not None
    await scaled

    failed = Counter((answer.status, answer.body) for answer in answers if answer.status != 200)
    assert not failed, project.logs("router")[-4000:]
    last = {answer.served_by for answer in answers[-REQUESTS_PER_S:]}
    await project.healthy(NUMBERS | {"pods": 2})
    assert last <= {each["Config"]["Hostname"] for each in project.containers("pods")}


async def test_a_configuration_that_the_router_cannot_read_is_logged_by_name(
    image: None, tmp_path: Path
) -> None:
    """As in a clone under umask 077: the container's user does not own the files."""
    folder = tmp_path / "clone"
    shutil.copytree(FILES, folder / FILES.relative_to(ROOT))
    shutil.copy(COMPOSE, folder)
    mounted = folder / (FILES / "router.yaml").relative_to(ROOT)
    mounted.chmod(0o600)
    clone = Project(folder, VERSION)
    try:
        await clone.up(["router"])

        async def is_logged() -> bool:
            return (
                "/etc/extproc/extproc.yaml: cannot be read: Permission denied: its mode is 0600"
                in (" ".join(clone.logs("router").split()))
            )

        await eventually(is_logged, within_s=60, every_s=0.5)
    finally:
        clone.down()
