"""An Envoy without a router writes what docs/what-if.md says, of which a record is made."""

from __future__ import annotations

import csv
from pathlib import Path

import aiohttp
import yaml
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.lab.fakepod.podserver import RunningPod
from extproc.lab.loadtest.fleetfiles import balancer_bootstrap
from tests.e2e.harness import Client, EnvoyProcess, connection_manager
from tests.pages import ROOT, blocks
from tests.waiting import eventually

PAGE = (ROOT / "docs" / "what-if.md").read_text(encoding="utf-8")
MARK = "a-prompt-that-nobody-may-keep"


def logging_envoy(pods: list[RunningPod], log: Path) -> EnvoyProcess:
    """An Envoy that balances by itself, with the page's log and filter."""
    access_log, model_filter = map(yaml.safe_load, blocks(PAGE, "yaml"))
    access_log["access_log"][0]["typed_config"]["path"] = str(log)
    document = yaml.safe_load(balancer_bootstrap("round_robin", [pod.address for pod in pods]))
    manager = connection_manager(document)
    manager["http_filters"].insert(0, model_filter)
    manager |= access_log
    return EnvoyProcess(yaml.safe_dump(document))


async def test_the_log_of_the_page_is_a_record_without_prompts(
    pods: list[RunningPod], tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    log, headers = tmp_path / "requests.json", {"x-tenant": "acme"}
    async with logging_envoy(pods, log) as envoy:
        client = Client(envoy.url, http)
        messages = [{"role": "user", "content": MARK}]
        await client.chat("shared", headers=headers, stream=True, max_tokens=20, messages=messages)
        await client.chat("base", messages=messages)
        await client.request("GET", "/v1/models")
        await client.request("POST", "/v1/completions", b"no JSON")
        await eventually(lambda: log.exists() and log.read_text().count("\n") == 4)
    command = ["record", "--envoy-log", str(log), "--base-model", "base", "--plain"]
    recorded = CliRunner().invoke(lab_app, command)
    rows = csv.DictReader(recorded.stdout.splitlines()[:-1])
    # Envoy's threads write when they get to it.
    streamed, whole, bad = sorted(rows, key=lambda row: float(row["arrival_s"]))

    assert "missing: 0 decisions" in recorded.stderr
    assert (streamed["adapter"], whole["adapter"], bad["adapter"]) == ("shared", "", "")
    assert [row["status"] for row in (streamed, whole, bad)] == ["200", "200", "400"]
    assert streamed["pod"] in {pod.address for pod in pods}
    assert 0 < float(streamed["ttft_s"]) <= float(streamed["duration_s"])
    assert (whole["ttft_s"], bool(streamed["tenant"]), whole["tenant"]) == ("", True, "")
    assert int(streamed["prompt_bytes"]) > len(MARK)
    assert int(streamed["output_bytes"]) > 20 * 100
    assert not any(mark in log.read_text() + recorded.output for mark in (MARK, "hi there"))
