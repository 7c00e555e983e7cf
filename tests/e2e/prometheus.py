"""A real Prometheus over routers, with our rules at a hundredth of their durations."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.stack.processes import ChildProcess, free_port, has_page
from tests.e2e.harness import RouterProcess
from tests.waiting import eventually

RULES = (
    Path(__file__).parents[2] / "manifests" / "components" / "monitoring" / "prometheusrule.yaml"
)
NAMESPACE = "llm"
PATIENCE_S = 120.0
_FASTER = 100
_INTERVAL = "500ms"
_UNITS_S = {"s": 1, "m": 60, "h": 3600}


def rules(text: str | None = None) -> dict[str, Any]:
    """The rules as Prometheus reads them, with every duration a hundredth: `for`, windows, ages."""
    document = yaml.safe_load(RULES.read_text(encoding="utf-8") if text is None else text)
    groups = document["spec"]["groups"]
    for rule in (rule for group in groups for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = _shorter(rule["for"])
        rule["expr"] = re.sub(r"\[(\w+)\]", lambda window: f"[{_shorter(window[1])}]", rule["expr"])
        rule["expr"] = re.sub(
            r"(_age_seconds\)) > (\d+)",
            lambda bound: f"{bound[1]} > {int(bound[2]) / _FASTER}",
            rule["expr"],
        )
    return {"groups": groups}


def _shorter(duration: str) -> str:
    number, unit = int(duration[:-1]), duration[-1]
    return f"{number * _UNITS_S[unit] * 1000 // _FASTER}ms"


class PrometheusProcess(ChildProcess):
    """A Prometheus that scrapes targets, `host:port`, by job and by name."""

    def __init__(self, jobs: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__("prometheus")
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": _INTERVAL, "evaluation_interval": _INTERVAL},
            "rule_files": [str(self.dir / "rules.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": list(_targets(targets))}
                for job, targets in jobs.items()
            ],
        }
        (self.dir / "rules.yml").write_text(yaml.safe_dump(rules()), encoding="utf-8")
        (self.dir / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")

    async def start(self) -> None:
        """Start, and return once it answers.

        Raises:
            StackError: It does not become ready.
        """
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("no prometheus on PATH (Debian package prometheus)")
        self.spawn(
            [
                *(program, f"--config.file={self.dir / 'prometheus.yml'}"),
                f"--web.listen-address={self.url.removeprefix('http://')}",
                f"--storage.tsdb.path={self.dir / 'data'}",
            ]
        )
        await self.wait_until(lambda: has_page(f"{self.url}/-/ready"))

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples that an expression has now."""
        answer = await self._get("query", query=expr)
        found: list[dict[str, Any]] = answer["result"]
        return found

    async def firing(self) -> dict[str, dict[str, Any]]:
        """Every alert that fires, by its name; of several with a name the last."""
        alerts = (await self._get("alerts"))["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    async def has_scraped(self, job: str, num: int) -> None:
        """Wait until as many targets of a job are up."""

        async def are_up() -> bool:
            return len(await self.query(f'up{{job="{job}"}} == 1')) == num

        await eventually(are_up, within_s=PATIENCE_S, every_s=0.1)

    async def until_firing(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Wait until all of these have fired, if not all at once; return each as it fired."""
        wanted = set(names)
        found: dict[str, dict[str, Any]] = {}

        async def have_fired() -> bool:
            found.update(await self.firing())
            return found.keys() >= wanted

        try:
            await eventually(have_fired, within_s=PATIENCE_S, every_s=0.2)
        except AssertionError as error:
            raise AssertionError(f"never fired: {wanted - found.keys()}") from error
        return found

    async def _get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}"
        async with aiohttp.ClientSession() as http, http.get(url, params=query) as response:
            answer = await response.json()
        assert answer["status"] == "success", answer
        return answer["data"]


def _targets(targets: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    for name, address in targets.items():
        yield {"targets": [address], "labels": {"namespace": NAMESPACE, "pod": name}}


@asynccontextmanager
async def watched(
    *routers: RouterProcess, **jobs: Mapping[str, str]
) -> AsyncIterator[PrometheusProcess]:
    """A Prometheus that has scraped these routers once; further jobs by their names."""
    ours = {
        f"router-{number}": router.admin_url.removeprefix("http://")
        for number, router in enumerate(routers)
    }
    async with PrometheusProcess({"extproc": ours, **jobs}) as prometheus:
        await prometheus.has_scraped("extproc", len(routers))
        yield prometheus
