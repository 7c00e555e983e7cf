"""The release before this one, to run beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from extproc import __version__
from tests.commandline import output_of, run
from tests.e2e.harness import RouterProcess

ROOT = Path(__file__).parents[2]
WHEEL = "EXTPROC_PREVIOUS_WHEEL"
"""The variable with the path of a wheel to use instead of one made of the history."""
BEFORE_FIRST_RELEASE = "e36d2421eb4612f0fe6463a6f65253aaa55c5987"
"""As long as there is no tag of an earlier version: a commit of 2026-11-25."""


def previous_wheel(folder: Path) -> Path:
    """Return a wheel of the release before this one; skip where there is no way to one."""
    if named := os.environ.get(WHEEL):
        return Path(named)
    commit = _previous_tag() or BEFORE_FIRST_RELEASE
    if _git("cat-file", "-e", f"{commit}^{{commit}}").returncode:
        pytest.skip(
            f"the history has no earlier release and no {commit[:8]}; {WHEEL} may name a wheel"
        )
    source = folder / "source"
    source.mkdir()
    _git("archive", "--output", str(folder / "source.tar"), commit).check_returncode()
    output_of("tar", "-xf", folder / "source.tar", "-C", source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    done = run(*pip, "--no-deps", "--wheel-dir", folder, source)
    if done.returncode:
        pytest.skip(f"no wheel can be built of {commit[:8]}: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpacked(wheel: Path, folder: Path) -> Path:
    """Unpack a wheel; with the folder in PYTHONPATH its program runs on what is installed here."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def become_previous(router: RouterProcess, packages: Path) -> None:
    """Let a router that has not started run the program of an unpacked wheel."""
    # `-P`: without the working directory, which is this checkout.
    router.command.insert(1, "-P")
    router.env = {**router.env, "PYTHONPATH": str(packages)}


def _previous_tag() -> str:
    """The newest tag of another version that this commit descends from; "" if there is none."""
    match = ("--match", "v*", "--exclude", f"v{__version__}")
    return _git("describe", "--tags", "--abbrev=0", *match).stdout.strip()


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return run("git", *words, cwd=ROOT)
