"""docs/what-if.md, typed: its fleet is recorded and asked about, on free ports."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.stack.processes import free_port
from tests.commandline import Command, commands
from tests.commands.test_quickstart_page import moved, type_it
from tests.pages import ROOT, blocks

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = (ROOT / "docs" / "what-if.md").read_text(encoding="utf-8")
UP, RECORD, LOAD, FROM_LOG, ASK = blocks(PAGE, "sh")
MARK = "a-prompt-that-nobody-may-keep"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Command, dict[str, object]]]:
    """The page's fleet, and its ports by those of the page."""
    gateway = free_port()
    with commands() as started:
        running = Command(tmp_path, *shlex.split(UP)[1:], "--port", str(gateway))
        started.append(running)
        running.wait_for_output("reply.choices")
        (grpc,) = re.findall(r"watch 127.0.0.1:(\d+)", running.output)
        yield running, {"p8080": gateway, "p9002": grpc}


@pytest.mark.long
def test_the_page_records_a_fleet_and_asks_what_another_would_give(
    tmp_path: Path, fleet: tuple[Command, dict[str, object]]
) -> None:
    _, ports = fleet
    words, name = moved(RECORD, ports).split(" > ")
    path = tmp_path / name.strip()
    body = json.dumps({"model": "customer-01", "prompt": MARK, "max_tokens": 9})
    curl = f"curl -sf 127.0.0.1:8080/v1/completions -H 'x-mark: {MARK}' -d {shlex.quote(body)}"
    with path.open("wb") as out, commands() as started:
        recording = Command(tmp_path, *shlex.split(words)[1:], stdout=out.fileno())
        started.append(recording)
        recording.wait_for_output("recording")
        # A busy machine sends late, which the load test says by its status.
        type_it(tmp_path, f"sleep 2\n{LOAD.strip()} || touch late", **ports)
        type_it(tmp_path, f"{curl} -H 'content-type: application/json' > answer", **ports)
        type_it(tmp_path, "sleep 2")
        recording.process.send_signal(2)
        assert recording.process.wait(60) == 0
    ours = [sys.executable, "-m", "extproc", *shlex.split(ASK)[1:]]
    asked = subprocess.run(ours, cwd=tmp_path, capture_output=True, text=True, check=False)
    text = path.read_text()

    assert text.count(",founding,") > 600
    assert MARK not in text
    assert not any(each in text for each in ("127.0.0.1", "customer", "pod-"))
    assert re.search(r"of 60\d requests", asked.stdout)
    # As the page says: on a busy machine no costs may explain what fake pods and clients take.
    is_busy = (tmp_path / "late").exists() or os.getloadavg()[0] > (os.cpu_count() or 1)
    is_refused = "promises nothing" in asked.stderr or "Give a --profile" in asked.stderr
    print(f"{asked.stdout}{asked.stderr}\nbusy: {is_busy}")
    assert "What it would have been" in asked.stdout or (is_busy and is_refused)
