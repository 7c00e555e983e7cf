"""The image as clusters run it: as its own user or as an arbitrary one, on a read-only file system.

OpenShift assigns a random user in group 0. What else restricts the container is read from the
Deployment of an overlay.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from tests.compose.files import ROOT
from tests.docker.engine import Project, need_engine, run
from tests.e2e.charts import SERVING, health
from tests.e2e.harness import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
VERSION = "test"
IMAGE = f"extproc-compose:{VERSION}"
OVERLAY = ROOT / "manifests" / "overlays" / "envoy-gateway"
ARBITRARY = 1_000_000_000 + secrets.randbelow(1_000_000_000)
"""As OpenShift's ranges of a namespace begin."""


@pytest.fixture(scope="module")
def image() -> None:
    """Build our image. It stays, so that the next build reuses its layers."""
    need_engine()
    Project(ROOT, VERSION).compose("build", "router")


def deployment() -> dict[str, Any]:
    """The Deployment that the overlay applies."""
    found = yaml.safe_load_all((OVERLAY / "rendered.yaml").read_text(encoding="utf-8"))
    (only,) = (each for each in found if each["kind"] == "Deployment")
    spec: dict[str, Any] = only["spec"]["template"]["spec"]
    return spec


def restrictions(container: dict[str, Any]) -> list[str]:
    """Docker's options for the container's security context."""
    context = container["securityContext"]
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true"]


USERS = {
    "the image's user": ([], (65532, 65532)),
    "any": ([f"--user={ARBITRARY}:0"], (ARBITRARY, 0)),
}
"""Docker's options for a user, and who the router is then."""


@dataclass(frozen=True)
class Started:
    """A container, the port of its health service, and who shall run in it."""

    name: str
    port: int
    user: tuple[int, int]


@pytest.fixture(params=USERS)
def started(image: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Started]:
    """A router by the overlay's arguments and file, with a fixed pod."""
    user, ids = USERS[request.param]
    (container,) = deployment()["containers"]
    config = yaml.safe_load((OVERLAY / "extproc.yaml").read_text(encoding="utf-8"))
    del config["peers"]
    config["discovery"] = {"static": ["127.0.0.1:8000"]}
    (tmp_path / "extproc.yaml").write_text(yaml.safe_dump(config))
    # As the files of a ConfigMap are.
    (tmp_path / "extproc.yaml").chmod(0o644)
    tmp_path.chmod(0o755)
    name, port = f"extproc-test-{secrets.token_hex(4)}", free_port()
    limit = container["resources"]["limits"]["memory"].replace("Mi", "m")
    options = [f"--memory={limit}", f"--publish=127.0.0.1:{port}:9003", f"--name={name}"]
    mount = f"{tmp_path / 'extproc.yaml'}:/etc/extproc/extproc.yaml:ro"
    hard = restrictions(container)
    done = run(
        "docker", "run", "--detach", *hard, *user, *options, "-v", mount, IMAGE, *container["args"]
    )
    assert done.returncode == 0, done.stderr
    try:
        yield Started(name, port, ids)
    finally:
        run("docker", "rm", "--force", name)


async def test_a_router_serves_as_any_user_that_is_not_root(started: Started) -> None:
    name, port = started.name, started.port

    async def is_alive() -> bool:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                return await health(channel, "liveness") == SERVING
            except grpc.aio.AioRpcError:
                return False

    try:
        await eventually(is_alive, within_s=60, every_s=0.5)
    except AssertionError as error:
        raise AssertionError(run("docker", "logs", name).stderr) from error
    inside = run("docker", "exec", name, "bash", "-c", "id -u; id -g; touch /written")
    stopped = run("docker", "stop", "--time=45", name)
    state = run("docker", "inspect", "--format={{.State.ExitCode}}", name)

    assert tuple(map(int, inside.stdout.split())) == started.user
    assert "Read-only file system" in inside.stderr
    assert (stopped.returncode, state.stdout.strip()) == (0, "0")
