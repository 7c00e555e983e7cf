"""Where a release is made, which version it has, and how its steps run programs."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_FILE = "extproc/__init__.py"
"""The one place of the version: the wheel, the image's label, the chart and tags follow it."""
LONGEST_STEP_S = 1800.0
"""A program that runs longer hangs."""


class ReleaseError(Exception):
    """What keeps a release from being made, in words for whoever makes it."""


@dataclass(frozen=True)
class Place:
    """A checkout that a release is made of.

    Attributes:
        root: The checkout.
        out: Where everything that a release consists of is written.
        image: Name of the image, without a tag.
        platform: Of the image, as Docker writes it; "" is the machine's own.
        audit: `required`, or `if-reachable`: whether a database of vulnerabilities has to answer.
    """

    root: Path = ROOT
    out: Path = ROOT / "dist"
    image: str = "extproc"
    platform: str = ""
    audit: str = "if-reachable"

    @property
    def version(self) -> str:
        """The version that this checkout has.

        Raises:
            ReleaseError: The file has none.
        """
        text = (self.root / VERSION_FILE).read_text(encoding="utf-8")
        found = re.search(r'^__version__ = "([^"]+)"$', text, re.M)
        if found is None:
            raise ReleaseError(f"{VERSION_FILE} has no __version__")
        return found[1]

    @property
    def architecture(self) -> str:
        """The architecture as it is written in names of files: `amd64`, `arm64`."""
        if self.platform:
            return self.platform.rpartition("/")[2]
        return run("docker", "version", "--format", "{{.Server.Arch}}").strip()

    @property
    def tagged(self) -> str:
        """The image's name and tag."""
        return f"{self.image}:{self.version}"

    def commit(self) -> str:
        """Return the checkout's commit."""
        return run("git", "rev-parse", "HEAD", cwd=self.root).strip()

    def committed_wall_s(self) -> int:
        """Return when the commit was made: archives carry this time, and can be made again."""
        return int(run("git", "log", "-1", "--format=%ct", cwd=self.root))

    def made(self, pattern: str) -> Path:
        """Return the one file of the release that matches.

        Raises:
            ReleaseError: There is none, or there are several.
        """
        found = sorted(self.out.glob(pattern))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise ReleaseError(f"{self.out.name} should have one file {pattern}, and has {names}")
        return found[0]


def run(
    *command: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    within_s: float = LONGEST_STEP_S,
) -> str:
    """Run a program and return what it printed.

    Raises:
        ReleaseError: It is missing, failed or took too long; with the end of what it said.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=within_s
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stdout + done.stderr)[-4000:]
        raise ReleaseError(f"{' '.join(command)} failed with {done.returncode}:\n{said}")
    return done.stdout


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
