"""The image: built on a Docker engine, saved, and its files read: packages, and what must not be
there.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import IO, cast

from release.packages import Package, from_dpkg_status, from_metadata
from release.place import Place, ReleaseError, run

MAX_SEARCHED_BYTES = 1 << 20
"""Larger files are libraries and data: nobody's credentials."""

_SECRET_NAMES = re.compile(
    r"(^|/)(\.netrc|\.pypirc|\.npmrc|\.git-credentials|id_(rsa|dsa|ecdsa|ed25519)|\.aws/credentials"
    r"|\.docker/config\.json|\.kube/config|\.env|\.git/config)$"
)
_SECRET_TEXTS = {
    # A key itself: libraries that read keys have the first line alone.
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{40}"),
    "a cloud's access key": re.compile(rb"\b(AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(rb"\b(gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60})"),
    "a token of PyPI": re.compile(rb"\bpypi-AgEIcHlwaS5vcmc[A-Za-z0-9_-]{50}"),
    "a token of Hugging Face": re.compile(rb"\bhf_[A-Za-z0-9]{34}\b"),
    "a password in an address of a package index": re.compile(
        rb"index.url\s*=\s*https?://[^/\s:]+:[^/\s@]+@"
    ),
}


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


@dataclass
class Found:
    """What an image has.

    Attributes:
        problems: What must not be there, each in words.
        packages: What is installed.
        num_files: Regular files.
        num_bytes: Their bytes.
    """

    problems: list[str] = field(default_factory=list)
    packages: list[Package] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0


def read_image(archive: IO[bytes]) -> Found:
    """Read an image's file system, once, as it comes."""
    found = Found()
    with tarfile.open(fileobj=archive, mode="r|*") as files:
        for member in files:
            found.problems += _wrong_modes(member)
            if not member.isfile():
                continue
            found.num_files += 1
            found.num_bytes += member.size
            if _SECRET_NAMES.search(member.name):
                found.problems.append(f"{member.name}: a file of that name holds credentials")
            if member.size <= MAX_SEARCHED_BYTES or _is_metadata(member.name):
                opened = files.extractfile(member)
                assert opened is not None  # a regular file
                content = opened.read()
                found.problems += _secrets(member.name, content)
                found.packages += _packages(member.name, content)
    return found


def _wrong_modes(member: tarfile.TarInfo) -> Iterator[str]:
    mode = member.mode
    if member.isfile() and mode & (stat.S_ISUID | stat.S_ISGID):
        yield f"{member.name}: runs as its owner or group (mode {mode:o})"
    is_shared = member.isdir() and mode & stat.S_ISVTX  # as /tmp
    if (member.isfile() or member.isdir()) and mode & stat.S_IWOTH and not is_shared:
        yield f"{member.name}: anyone may write it (mode {mode:o})"


def _secrets(name: str, content: bytes) -> Iterator[str]:
    for what, pattern in _SECRET_TEXTS.items():
        if pattern.search(content):
            yield f"{name}: {what}"


def _is_metadata(name: str) -> bool:
    return name.endswith((".dist-info/METADATA", "var/lib/dpkg/status")) or (
        "var/lib/dpkg/status.d/" in name
    )


def _packages(name: str, content: bytes) -> list[Package]:
    if not _is_metadata(name):
        return []
    text = content.decode("utf-8", errors="replace")
    is_python = PurePosixPath(name).name == "METADATA"
    return [from_metadata(text)] if is_python else from_dpkg_status(text)
