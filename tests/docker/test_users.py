"""The image as clusters run it, as router or as endpoint picker: as its own user or as an arbitrary
one, on a read-only file system.

OpenShift assigns a random user in group 0. What else restricts the container is read from the
Deployment of an overlay.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from tests.commandline import run
from tests.compose.files import ROOT
from tests.docker.engine import need_engine
from tests.e2e.charts import SERVING, health
from tests.e2e.harness import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
IMAGE = "extproc:test"
OVERLAYS = ROOT / "manifests" / "overlays"
ARBITRARY = 1_000_000_000 + secrets.randbelow(1_000_000_000)
"""As OpenShift's ranges of a namespace begin."""


@pytest.fixture(scope="module")
def image() -> None:
    """Build our image. It stays, so that the next build reuses its layers."""
    need_engine()
    env = {**os.environ, "DOCKER_BUILDKIT": "0"}  # an engine may have no buildx
    done = run("docker", "build", "--tag", IMAGE, ".", within_s=900, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr


def deployment(overlay: str) -> dict[str, Any]:
    """The spec of the pods that the overlay's Deployment makes."""
    text = (OVERLAYS / overlay / "rendered.yaml").read_text(encoding="utf-8")
    (only,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
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


def serve_files() -> dict[str, Any]:
    """The overlay's file, with a fixed pod."""
    config = yaml.safe_load((OVERLAYS / "envoy-gateway" / "extproc.yaml").read_text("utf-8"))
    del config["peers"]
    config["discovery"] = {"static": ["127.0.0.1:8000"]}
    return {"extproc.yaml": config}


def epp_files() -> dict[str, Any]:
    """The overlay's file, and a cluster that does not answer: it goes on asking."""
    config = yaml.safe_load((OVERLAYS / "inference-pool" / "extproc.yaml").read_text("utf-8"))
    del config["peers"]
    kubeconfig = {
        "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": "none"}}],
    }
    return {"extproc.yaml": config, "kubeconfig": kubeconfig}


COMMANDS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "serve": ("envoy-gateway", serve_files),
    "epp": ("inference-pool", epp_files),
}
"""The overlay with each command, and the files that it is given."""


def writable(spec: dict[str, Any]) -> list[str]:
    """Docker's options for the empty directories that the pod has."""
    empty = {each["name"] for each in spec["volumes"] if "emptyDir" in each}
    (container,) = spec["containers"]
    mounts = [each["mountPath"] for each in container["volumeMounts"] if each["name"] in empty]
    # Kubernetes makes them writable for everybody.
    return [f"--tmpfs={path}:rw,mode=1777" for path in mounts]


@pytest.fixture(params=[f"{command} as {user}" for command in COMMANDS for user in USERS])
def started(image: None, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Started]:
    """A router by an overlay's arguments and its file."""
    command, _, who = request.param.partition(" as ")
    (overlay, files), (user, ids) = COMMANDS[command], USERS[who]
    spec = deployment(overlay)
    (container,) = spec["containers"]
    assert container["args"][0] == command
    for file, content in files().items():
        (tmp_path / file).write_text(yaml.safe_dump(content))
        (tmp_path / file).chmod(0o644)  # as the files of a ConfigMap are
    tmp_path.chmod(0o755)
    name, port = f"extproc-test-{secrets.token_hex(4)}", free_port()
    limit = container["resources"]["limits"]["memory"].replace("Mi", "m")
    options = [f"--memory={limit}", f"--publish=127.0.0.1:{port}:9003", f"--name={name}"]
    environment = ["--env=KUBECONFIG=/etc/extproc/kubeconfig", "--env=NAMESPACE=llm"]
    hard = [*restrictions(container), *writable(spec), f"--volume={tmp_path}:/etc/extproc:ro"]
    done = run(
        *("docker", "run", "--detach", *hard, *user, *options, *environment),
        *(IMAGE, *container["args"]),
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
