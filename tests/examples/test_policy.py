"""The example of a policy: configured as its head says, behind a real Envoy, and in the laboratory.

The policy's own test, which users can copy, runs beside it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.commands.labrun import read_result
from extproc.lab.fakepod.podserver import PodConfig
from tests.commandline import invoke, run
from tests.e2e.conftest import behind_envoy, router_config
from tests.e2e.harness import free_port
from tests.fakepods import running_pods

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "policy"
ADAPTERS = [f"tenant-{n}/{name}" for n in range(8) for name in ("sql", "chat")]


def policy_section() -> dict[str, Any]:
    (line,) = re.findall(r"^    (policy: .*)$", (FOLDER / "tenants.py").read_text(), re.M)
    found: dict[str, Any] = yaml.safe_load(line)
    return found


def test_the_configuration_that_it_shows_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    path = tmp_path / "extproc.yaml"
    ports = {each: {"address": f"127.0.0.1:{free_port()}"} for each in ("server", "admin")}
    path.write_text(
        yaml.safe_dump({"discovery": {"static": ["10.0.0.7:8000"]}, **ports, **policy_section()})
    )

    result = invoke("check-config", "--config", str(path))

    assert result.output == f"{path}: ok (policy tenants:Tenants)\n"


@pytest.mark.e2e
async def test_a_tenant_s_requests_stay_on_its_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{FOLDER}:{ROOT}")
    policy = policy_section()
    policy["policy"]["args"]["num_pods"] = 1
    configs = [PodConfig(name=f"pod-{n}", adapters=ADAPTERS, max_loras=1) for n in range(6)]
    served: dict[str, set[str]] = {}
    async with (
        running_pods(*configs) as pods,
        aiohttp.ClientSession() as http,
        behind_envoy(router_config(pods, **policy), http) as (router, client),
    ):
        for adapter in ADAPTERS * 3:
            answer = await client.chat(adapter)
            assert answer.status == 200
            served.setdefault(adapter.partition("/")[0], set()).add(answer.served_by)
        decisions = (await router.admin("/debug/decisions"))["decisions"]

    assert {decision["pick"]["policy"] for decision in decisions} == {"tenants:Tenants"}
    assert {len(names) for names in served.values()} == {1}
    assert len(set.union(*served.values())) > 1


@pytest.mark.slow
def test_the_laboratory_judges_it(tmp_path: Path) -> None:
    """As `extproc lab run quick --policy tenants:Tenants --only ...`, with fewer requests."""
    text = (ROOT / "loadtest" / "scenarios" / "quick.yaml").read_text(encoding="utf-8")
    suite = {**yaml.safe_load(text), "num_requests": 100, "seeds": [1], "rates_rps": [8, 16]}
    suite |= {"policies": ["founding", "least_pending"], "bounds": [], "sweeps": []}
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(suite))

    command = [sys.executable, "-m", "extproc", "lab", "run", str(path)]
    command += ["--policy", "tenants:Tenants", "--only", "tenants:Tenants", "--only", "founding"]
    command += ["--jobs", "1", "--out", str(tmp_path / "mine.json")]
    done = run(*command, cwd=FOLDER, within_s=170)

    assert done.returncode == 0, done.stderr
    assert "0 of 2 trials" in done.stderr
    (summary,) = read_result(tmp_path / "mine.json")["summary"].values()
    assert {row["policy"] for row in summary["rows"]} == {"tenants:Tenants", "founding"}
    assert "tenants:Tenants" in done.stdout
    (row,) = (row for row in summary["rows"] if row["policy"] == "tenants:Tenants")
    assert row["capacity_rps"]["mean"] > 0
