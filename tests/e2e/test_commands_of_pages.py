"""Every command of the pages for on-call is typed, at a router configured as the chart renders it.

What its output means in trouble is for tests/e2e/test_ways_to_causes.py.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import RunningPod
from extproc.stack.processes import free_port
from tests.e2e.conftest import own_pods, running_envoy
from tests.e2e.harness import Client, RouterProcess
from tests.e2e.prometheus import watched
from tests.e2e.typed import Said, addresses, type_it
from tests.kubernetes.manifests import MANIFESTS, declaring, objects
from tests.pages import blocks
from tests.test_runbooks import ALERTS, TROUBLES, installed, metrics_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMANDS = list(
    dict.fromkeys(
        line
        for page in (ALERTS, TROUBLES)
        for block in blocks(page.read_text(encoding="utf-8"), "sh")
        for line in block.splitlines()
        if not line.startswith("export ")
    )
)
KUBECTL = 'kubectl() { printf "%s\\n" "$*" >> $CALLS; }; '
"""Stands for a cluster that has nothing to say; what is asked of it is compared with the chart."""


def as_installed(pods: Sequence[RunningPod]) -> dict[str, Any]:
    """The chart's configuration, but for what only a cluster has."""
    config = installed()
    kept = {key: config[key] for key in config.keys() - {"discovery", "peers", "server"}}
    kept["admin"] = {"metrics_address": f"127.0.0.1:{free_port()}"}
    static = [{"address": pod.address, "name": pod.name} for pod in pods]
    declared = declaring(*(f"only-{number}" for number in range(len(pods))), "shared")
    return {**kept, "discovery": {"static": static}, **declared}


async def test_every_command_of_the_pages_runs_at_an_installed_router(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with (
        own_pods(3) as pods,
        RouterProcess(as_installed(pods)) as router,
        running_envoy(Mode.OVERRIDE_HOST, router) as envoy,
        watched(router) as prometheus,
    ):
        client = Client(envoy.url, http)
        answers = [await client.chat("only-0", stream=True) for _ in range(4)]
        assert {each.status for each in answers} == {200}
        [decision] = (await router.admin("/debug/decisions?n=1"))["decisions"]
        page = await router.admin("/metrics")
        env = addresses(tmp_path, router, prometheus) | {
            "MODEL": "only-0",
            "ID": decision["pick"]["id"],
            "GATEWAY": envoy.url,
            "CALLS": str(tmp_path / "calls"),
        }
        turns = asyncio.Semaphore(4)

        async def typed(command: str) -> Said:
            async with turns:
                return await type_it(KUBECTL + command, env)

        said = await asyncio.gather(*map(typed, COMMANDS))

    asked = dict(zip(COMMANDS, said, strict=True))
    assert len(asked) > 50
    ill = [f"{line}: {each}" for line, each in asked.items() if not is_well(line, each, page)]
    assert "\n".join(ill) == ""
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert len(calls) == sum("kubectl " in line for line in COMMANDS)
    assert [each for each in calls if not is_of_the_chart(shlex.split(each))] == []


def is_well(line: str, said: Said, page: str) -> bool:
    """Whether a command ended well; `grep` may find nothing of metrics that exist, or in a log."""
    exist = set(re.findall(r"^# HELP (\w+)", page, re.M))
    named = {re.sub(r"_(sum|count)$", "", each) for each in metrics_named(line)}
    is_absent = "| grep" in line and all(
        each in exist or each.startswith("extproc_kubernetes_") for each in named
    )
    errors = re.sub(r"^extproc: warning: .*\n", "", said.errors, flags=re.M)  # of check-config
    return not errors and (said.status == 0 or (said.status == 1 and is_absent))


def is_of_the_chart(words: list[str]) -> bool:
    """Whether what is asked of the cluster exists in it, as the chart's overlay has it."""
    rendered = objects((MANIFESTS / "overlays/envoy-gateway/rendered.yaml").read_text("utf-8"))
    names = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in rendered}
    [pod] = [each["spec"]["template"] for each in rendered if each["kind"] == "Deployment"]
    labels = {f"{key}={value}" for key, value in pod["metadata"]["labels"].items()}
    if "-l" in words:
        return words[words.index("-l") + 1] in labels
    named = [word for word in words if word.startswith("deployment/")]
    return set(named) <= names if named else words[-1] == "llmroutes" or "httproute" in words
