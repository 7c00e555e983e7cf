"""Kubernetes as a source of endpoints, as far as it shows without an API server."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import aiohttp
import yaml

from extproc.app.app import App
from extproc.app.routing import make_policy
from extproc.config.file import parse_config
from tests.e2e.harness import eventually


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
