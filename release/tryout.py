"""The wheel, installed in an empty environment and used as the quick start uses it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release.packages import Package, from_metadata
from release.place import Place, ReleaseError, run

READY_WITHIN_S = 120.0
"""An interpreter, two fake pods and Envoy start in a few seconds; a busy machine needs more."""
_LOG_CHARS = 4000


@dataclass(frozen=True)
class Routed:
    """A request that went through Envoy and the router to a pod."""

    model: str
    served_by: str


def install(place: Place, folder: Path) -> Path:
    """Install the wheel with what `extproc up` needs; return the environment's `bin`.

    Raises:
        ReleaseError: There is no wheel, or it cannot be installed.
    """
    run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    wheel = place.made("*.whl")
    pins = str(place.root / "constraints.txt")
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--constraint", pins, f"{wheel}[demo]", cwd=folder)
    return folder / "bin"


def installed(bin_folder: Path) -> list[Package]:
    """Return the Python packages of an environment."""
    found = bin_folder.parent.glob("lib/*/site-packages/*.dist-info/METADATA")
    return [from_metadata(path.read_text(encoding="utf-8")) for path in sorted(found)]


def route_one(bin_folder: Path, version: str) -> Routed:
    """Run `extproc up --fake-pods 2` until a request for each model has been routed.

    Raises:
        ReleaseError: It ends, says another version, or answers otherwise.
    """
    # Nothing of the checkout: neither its folder nor what the environment says of Python.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{bin_folder}{os.pathsep}{env.get('PATH', '')}"
    said = run(str(bin_folder / "extproc"), "--version", cwd=bin_folder.parent, env=env)
    if version not in said.split():
        raise ReleaseError(f"`extproc --version` says {said!r} and not {version}")
    port = _free_port()
    command = [str(bin_folder / "extproc"), "up", "--fake-pods", "2", "--port", str(port)]
    log = bin_folder.parent / "up.log"
    with log.open("wb") as file, _running(command, file, env, bin_folder.parent) as process:
        url = f"http://127.0.0.1:{port}"
        models = _models(url, process, log)
        routed = [_ask(url, model) for model in models]
        if not routed:
            raise ReleaseError("no pod lists a model")
    if process.returncode != 0:
        raise ReleaseError(f"`extproc up` ended with {process.returncode}:\n{_end_of(log)}")
    return routed[-1]


@contextlib.contextmanager
def _running(
    command: list[str], log: Any, env: dict[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command, and end it as Ctrl-C would."""
    process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _models(url: str, process: subprocess.Popen[bytes], log: Path) -> list[str]:
    """What the gateway lists, as soon as it lists something."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ReleaseError(f"`extproc up` ended with {process.returncode}:\n{_end_of(log)}")
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"{url}/v1/models", timeout=5) as response,
        ):
            if names := [card["id"] for card in json.load(response)["data"]]:
                return names
        time.sleep(0.2)
    raise ReleaseError(f"`extproc up` lists no model in {READY_WITHIN_S:g} s:\n{_end_of(log)}")


def _ask(url: str, model: str) -> Routed:
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
            served_by = response.headers.get("x-served-by") or ""
    except (OSError, ValueError) as error:
        raise ReleaseError(f"a request for {model} failed: {error}") from error
    if answer.get("model") != model or not served_by:
        raise ReleaseError(f"a request for {model} got {answer}, served by {served_by!r}")
    return Routed(model, served_by)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
