"""`extproc` as people run it: a process, with whatever it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from extproc.commands.main import app

MARK = "EXTPROC_TEST_COMMAND"
GONE_WITHIN_S = 60.0


def invoke(*arguments: str, given: str | None = None) -> Result:
    """Run a command in this process; `given` is its standard input."""
    return CliRunner().invoke(app, list(arguments), input=given)


def run(
    *command: str | Path, within_s: float = 120.0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and keep what it says."""
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=within_s, **more
    )


def output_of(*command: str | Path, **more: Any) -> str:
    """Return what a program prints that ends well."""
    done = run(*command, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def error_line(result: Result) -> str:
    """The one line that says what is wrong with a command."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("extproc: ")
    return line.removeprefix("extproc: ")


class Command:
    """A running command. It and what it started are found by a variable that they inherit.

    Args:
        folder: For temporary files, and for the output.
        stdout: A file in place of the output's.
        env: Added to the environment.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        stdout: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = f"{MARK}={uuid.uuid4()}"
        self._path = folder / f"output-{self._mark[-8:]}"
        name, _, value = self._mark.partition("=")
        with self._path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "extproc", *arguments],
                stdout=output if stdout is None else stdout,
                stderr=output,
                env={
                    **os.environ,
                    **{name: value, "TMPDIR": str(folder), "COLUMNS": "120"},
                    **(env or {}),
                },
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """The output so far."""
        return self._path.read_text(encoding="utf-8")

    def processes(self) -> list[int]:
        """Return the processes of the command and of what it started that still run."""
        return [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and self._mark.encode() in _environment(folder)
        ]

    def wait_until_started(self, num_processes: int) -> None:
        self.wait_until(lambda: len(self.processes()) >= num_processes)

    def wait_for_output(self, text: str) -> None:
        self.wait_until(lambda: text in self.output)

    def wait_until(self, check: Callable[[], bool]) -> None:
        """Wait for `check` as long as the command runs."""
        while not check():
            assert self.process.poll() is None, self.output
            time.sleep(0.05)

    def wait_until_gone(self) -> None:
        """Wait until no process is left: killed ones need a moment."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while self.processes():
            assert time.monotonic() < deadline_s, f"left behind: {self.processes()}"
            time.sleep(0.05)

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def commands() -> Iterator[list[Command]]:
    """A list whose commands are ended with the block."""
    started: list[Command] = []
    try:
        yield started
    finally:
        for command in started:
            command.close()


def snippets(output: str) -> tuple[str, str]:
    """Return the requests that `extproc up` printed: for a shell, and for Python."""
    shell, python = output.split("# in a shell\n")[1].split("# in Python\n")
    return shell, python.split("# Ctrl-C")[0]


def _environment(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return b""
