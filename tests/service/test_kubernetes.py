"""Kubernetes as a source of endpoints, as far as it shows without an API server."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.config.configfile import parse_config
from extproc.config.configured import kubernetes_settings
from extproc.config.discovery import KubernetesConfig
from extproc.discovery.kubernetes.source import KubernetesDiscovery
from extproc.service.app import App
from extproc.service.routing import make_policy
from tests.waiting import eventually


def configuration(kubeconfig: Path) -> str:
    source = {"kubeconfig": str(kubeconfig), "pod_selector": "app=vllm", "port": 8000}
    return yaml.safe_dump(
        {
            "server": {"address": "127.0.0.1:0"},
            "admin": {"address": "127.0.0.1:0"},
            "discovery": {"kubernetes": source},
        }
    )


async def test_it_is_not_ready_before_the_first_list(tmp_path: Path) -> None:
    """Nobody listens where the kubeconfig says."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        path = tmp_path / "kubeconfig"
        cluster = {"server": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        context = {"cluster": "it", "user": "it"}
        kubeconfig = {
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": "x"}}],
            "contexts": [{"name": "it", "context": context}],
            "current-context": "it",
        }
        path.write_text(yaml.safe_dump(kubeconfig))
        config = parse_config(configuration(path))
        app = App(config, make_policy(config))
        run = asyncio.ensure_future(app.run())

        async def says() -> bool:
            if not app.admin_address:
                return False
            url = f"http://{app.admin_address}"
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{url}/metrics") as response:
                    has_tried = 'extproc_kubernetes_failures_total{reason="connection"}' in (
                        await response.text()
                    )
                async with http.get(f"{url}/healthz") as response:
                    return has_tried and "discovery has not synced" in await response.text()

        try:
            await eventually(says, within_s=60)
        finally:
            app.stop()
            await run


@pytest.mark.parametrize("follows", [True, False])
async def test_what_a_cluster_declares_is_unknown_only_where_it_is_wanted(follows: bool) -> None:
    """A Role that lacks the right on purpose is no reason to refuse adapters for ever."""
    discovery = KubernetesDiscovery(
        kubernetes_settings(KubernetesConfig(service="vllm", declarations=follows)),
        on_endpoints=lambda _: None,
        on_priorities=lambda _: None,
        scheme="http",
        engine="vllm",
        fails_open=False,
        clock=time.monotonic,
        wall_clock=time.time,
        rng=random.Random(1),
        on_rules=lambda _rules: None,
        on_offers=lambda _offers, _withheld: None,
    )

    unread = [each.name for each in discovery.sources() if not each.is_complete]
    assert unread == (["LLMRoutes", "InferenceModelRewrites"] if follows else [])
