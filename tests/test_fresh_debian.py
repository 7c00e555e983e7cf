"""scripts/fresh-debian: the new machine that commands run on, and what is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.pages import ROOT

CANNOT_RUN = 77
WITHIN_S = 600
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "extproc-fresh-debian"


def fresh(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [str(ROOT / "scripts" / "fresh-debian"), *arguments]
    return subprocess.Popen(
        command,
        text=True,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell has what it starts in the background ignore this signal, and bash keeps that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_where_it_cannot_run_it_says_why(tmp_path: Path) -> None:
    for name in ("bash", "env", "realpath", "uname", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))

    running = fresh("trixie", "true", env={"PATH": str(tmp_path)})
    output, errors = running.communicate(timeout=WITHIN_S)

    assert (running.returncode, output) == (CANNOT_RUN, "")
    assert errors in (
        "fresh-debian: skipped: needs Linux and root\n",
        "fresh-debian: skipped: no debootstrap on PATH\n",
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variable that names a cache where nothing else runs, with a system that is made."""
    running = fresh("trixie", "true")
    _, errors = running.communicate(timeout=WITHIN_S)
    if running.returncode == CANNOT_RUN:
        pytest.skip(errors.strip())
    folder = tmp_path_factory.mktemp("cache")
    (folder / CACHE.name).mkdir()
    (folder / CACHE.name / "trixie.tar").symlink_to(CACHE / "trixie.tar")
    return {"XDG_CACHE_HOME": str(folder)}


def left(cache: Mapping[str, str]) -> list[str]:
    return sorted(path.name for path in Path(cache["XDG_CACHE_HOME"], CACHE.name).iterdir())


LOOK = """id -un; umask; basename "$PWD"; ls .git; command -v git
for port in 8080 9002 9090; do
    python3 -c "import socket; socket.create_server(('127.0.0.1', $port))"
done
cat /proc/net/if_inet6
exit 3
"""


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_hard_machine_is_a_users_with_no_git_no_network_and_no_usual_port(
    cache: dict[str, str],
) -> None:
    running = fresh("--hard", "trixie", "test -e Makefile", LOOK, env=cache)
    output, errors = running.communicate(timeout=WITHIN_S)

    assert running.returncode == 3, errors
    said = [line for line in output.splitlines() if line != "the usual ports are taken"]
    first = said.index("user")
    assert said[first : first + 4] == [
        "user",
        "0077",
        "extproc (copy)",
        "== " + LOOK.partition("\n")[0],
    ]
    assert errors.count("Address already in use") == 3
    assert left(cache) == ["trixie.tar"]


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_plain_machine_is_roots_and_has_a_clone(cache: dict[str, str]) -> None:
    running = fresh("trixie", "id -un; git status --short; git log -1 --format=%H", env=cache)
    output, errors = running.communicate(timeout=WITHIN_S)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)

    assert running.returncode == 0, errors
    assert output.splitlines()[1:-1] == ["root", commit.strip()]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_of_a_run_that_is_interrupted_nothing_is_left(
    number: signal.Signals, cache: dict[str, str]
) -> None:
    running = fresh("trixie", "setsid sleep 600 & echo waits; sleep 600", env=cache)
    assert running.stdout is not None
    assert "waits\n" in iter(running.stdout.readline, "")
    assert len(left(cache)) == 2

    running.send_signal(number)
    running.send_signal(number)

    assert running.wait(timeout=WITHIN_S) == 128 + number
    assert left(cache) == ["trixie.tar"]
    # The pipe ends only with the last process that holds it.
    running.communicate(timeout=WITHIN_S)
