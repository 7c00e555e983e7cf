"""The image: built on a Docker engine, saved, and its files read."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, cast

from release.imagefiles import Found, read_image
from release.place import Place, ReleaseError, run


def build(place: Place) -> str:
    """Build the image; return its id (`sha256:...`).

    Raises:
        ReleaseError: There is no engine, or it cannot build the image.
    """
    created = datetime.fromtimestamp(place.committed_wall_s(), UTC)
    arguments = {
        "VERSION": place.version,
        "REVISION": place.commit(),
        "CREATED": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    given = [word for pair in arguments.items() for word in ("--build-arg", "=".join(pair))]
    given += ["--platform", place.platform] if place.platform else []
    run("docker", "build", "--tag", place.tagged, *given, ".", cwd=place.root, env=_environment())
    return run("docker", "image", "inspect", "--format", "{{.Id}}", place.tagged).strip()


def _environment() -> dict[str, str]:
    """Engines without buildx build as they did before it."""
    env = dict(os.environ)
    if subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode:
        env["DOCKER_BUILDKIT"] = "0"
    return env


def save(place: Place) -> Path:
    """Write the image to a file that `docker load` reads, without the time of writing.

    Raises:
        ReleaseError: The engine does not have it.
    """
    path = place.out / f"extproc-{place.version}-image-{place.architecture}.tar.gz"
    archive = path.with_suffix("")
    run("docker", "save", "--output", str(archive), place.tagged)
    run("gzip", "--force", "--no-name", str(archive))
    return path


def read(place: Place) -> Found:
    """Read the files of the image as a container would find them, without starting one.

    Raises:
        ReleaseError: The engine does not have the image.
    """
    container = run("docker", "create", place.tagged).strip()
    try:
        with subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as exporting:
            found = read_image(cast(IO[bytes], exporting.stdout))
    finally:
        run("docker", "rm", container)
    if exporting.returncode:
        raise ReleaseError(f"docker export failed with {exporting.returncode}")
    return found
