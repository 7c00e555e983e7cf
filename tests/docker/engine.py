"""docker-compose.yml on a real engine: a project of its own, taken down with all that it made."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.commandline import run
from tests.compose.files import ROOT
from tests.e2e.harness import free_port
from tests.waiting import eventually

START = "EXTPROC_DOCKER_START"
"""The variable with a command that starts an engine that has the images or can pull them."""
_LONG_S = 900.0


def need_engine() -> None:
    """Skip where no engine runs and none can be started."""
    if shutil.which("docker") is None and START not in os.environ:
        pytest.skip(f"no docker here, and {START} names no command that starts an engine")
    if _has_engine():
        return
    if START not in os.environ:
        pytest.skip(f"no Docker engine runs here, and {START} names no command that starts one")
    done = run("sh", "-c", os.environ[START], within_s=_LONG_S, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _has_engine(), f"{START} has started no engine"


def _has_engine() -> bool:
    return shutil.which("docker") is not None and run("docker", "info").returncode == 0


def compose_command() -> list[str]:
    """Return `docker compose`, or its older form; skip where there is neither."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]) and run(*words, "version").returncode == 0:
            return words
    pytest.skip("no docker compose: apt-get install docker-compose")


class Project:
    """A compose project of services from a folder.

    Args:
        folder: Where docker-compose.yml is.
        version: Tag of the images.
        fake_pods: Containers of the service `pods`.
    """

    def __init__(self, folder: Path, version: str, *, fake_pods: int = 8) -> None:
        self.name = f"extproc-test-{secrets.token_hex(4)}"
        self.gateway_port = free_port()
        self._folder = folder
        self._compose = [*compose_command(), "-p", self.name]
        self._env = {
            **os.environ,
            "VERSION": version,
            "FAKE_PODS": str(fake_pods),
            "GATEWAY_PORT": str(self.gateway_port),
        }

    def compose(self, *words: str, **env: str) -> str:
        """Run `docker compose` with these words; return its output."""
        done = run(
            *self._compose, *words, within_s=_LONG_S, cwd=self._folder, env={**self._env, **env}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """`docker inspect` of every running container, or of those of a service."""
        labels = [f"label=com.docker.compose.project={self.name}"]
        labels += [f"label=com.docker.compose.service={service}"] * bool(service)
        filters = [word for label in labels for word in ("--filter", label)]
        ids = run("docker", "ps", "--quiet", *filters).stdout.split()
        inspected = run("docker", "inspect", *ids).stdout if ids else "[]"
        found: list[dict[str, Any]] = json.loads(inspected)
        return found

    async def healthy(self, numbers: Mapping[str, int], *, within_s: float = 300.0) -> None:
        """Wait until so many containers of each service run, all of them healthy."""

        async def are() -> bool:
            states = [(service_of(each), health_of(each)) for each in self.containers()]
            wanted = [(name, "healthy") for name, number in numbers.items() for _ in range(number)]
            return sorted(states) == sorted(wanted)

        try:
            await eventually(are, within_s=within_s, every_s=0.5)
        except AssertionError as error:
            raise AssertionError(self.logs()) from error

    def inside(self, service: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the first container of a service."""
        return run("docker", "exec", self.containers(service)[0]["Id"], *command)

    def logs(self, service: str = "") -> str:
        """Return the containers' logs."""
        return self.compose("logs", "--no-color", *([service] if service else []))

    async def up(self, services: Sequence[str], **env: str) -> None:
        """Start the services, without waiting for their health."""
        await asyncio.to_thread(self.compose, "up", "-d", "--no-build", *services, **env)

    def down(self) -> None:
        """Remove everything, volumes too."""
        self.compose("down", "--volumes", "--remove-orphans")

    def remains(self) -> list[str]:
        """Return the ids of all that is left of the project."""
        label = f"label=com.docker.compose.project={self.name}"
        lists = (["ps", "--all"], ["network", "ls"], ["volume", "ls"])
        return [
            each
            for words in lists
            for each in run("docker", *words, "--quiet", "--filter", label).stdout.split()
        ]


def service_of(container: Mapping[str, Any]) -> str:
    """Return the service of a container."""
    name: str = container["Config"]["Labels"]["com.docker.compose.service"]
    return name


def health_of(container: Mapping[str, Any]) -> str:
    """Return the state of a container's check: starting, healthy, unhealthy."""
    state: str = container["State"]["Health"]["Status"]
    return state
