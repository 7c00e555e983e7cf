"""A real LiteLLM proxy in front: Envoy and the router behind it still choose by adapter."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import RunningPod
from extproc.stack.processes import get_page
from tests.e2e.conftest import own_pods, router_config, running_envoy
from tests.e2e.harness import Answer, ChildProcess, Client, EnvoyProcess, RouterProcess, free_port

VENV = Path(__file__).parents[2] / ".venv-litellm"
KEY = f"sk-{secrets.token_hex(16)}"
START_TIMEOUT_S = 900
"""Its imports take ten CPU seconds, which is long on a busy machine."""

pytestmark = [
    pytest.mark.timeout(START_TIMEOUT_S + 60),
    pytest.mark.skipif(
        not (VENV / ".installed").exists(), reason="no LiteLLM here: run scripts/install-litellm"
    ),
]


def litellm_config(entries: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The configuration in docs/ecosystem.md.

    Args:
        entries: By the name that clients use, the name behind it and the Envoy's URL.
    """
    return {
        "model_list": [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{behind}",
                    "api_base": f"{envoy_url}/v1",
                    "api_key": "none",
                },
            }
            for name, (behind, envoy_url) in entries.items()
        ],
        "litellm_settings": {"num_retries": 0},
        "router_settings": {"num_retries": 0, "disable_cooldowns": True},
        "general_settings": {"master_key": KEY},
    }


class LiteLlmProcess(ChildProcess):
    """`litellm --config`, without a database and without the network.

    Args:
        config: The configuration file's content.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__("litellm")
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._config_path = self.dir / "config.yaml"
        self._config_path.write_text(yaml.safe_dump(config))

    async def start(self) -> None:
        """Start, and return once it is up.

        Raises:
            StackError: It ended or did not come up; with its log.
        """
        nowhere = "http://127.0.0.1:9"
        environment = {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # Requests to anything but us fail at once.
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1",
            "HOME": str(self.dir),
        }
        command = [str(VENV / "bin" / "litellm"), "--config", str(self._config_path)]
        self.spawn([*command, "--host", "127.0.0.1", "--port", str(self._port)], environment)
        await self.wait_until(lambda: get_page(f"{self.url}/health/liveliness"), START_TIMEOUT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(pods: list[RunningPod], router: RouterProcess) -> AsyncIterator[EnvoyProcess]:
    async with running_envoy(Mode.ORIGINAL_DST, router) as envoy:
        yield envoy


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def dead_gateway() -> AsyncIterator[tuple[EnvoyProcess, RouterProcess]]:
    """A gateway whose only pod was killed, and the router behind it."""
    async with (
        own_pods(1) as pods,
        RouterProcess(router_config(pods)) as router,
        running_envoy(Mode.ORIGINAL_DST, router) as envoy,
    ):
        await pods[0].kill()
        yield envoy, router


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def litellm(
    gateway: EnvoyProcess, dead_gateway: tuple[EnvoyProcess, RouterProcess]
) -> AsyncIterator[LiteLlmProcess]:
    """One for all tests here."""
    entries = {
        "only-0": ("only-0", gateway.url),
        "bot": ("only-1", gateway.url),
        "lora/*": ("*", gateway.url),
        "dead": ("only-0", dead_gateway[0].url),
    }
    async with LiteLlmProcess(litellm_config(entries)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(litellm: LiteLlmProcess) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        yield Client(litellm.url, http)


def served_by(answer: Answer) -> str:
    """Name of the pod; LiteLLM hands on an upstream's headers with a prefix."""
    return answer.headers.get("llm_provider-x-served-by", "")


async def num_asked(router: RouterProcess) -> float:
    """Requests for which the router was asked so far; lists, which LiteLLM reads, are none."""
    page = await router.admin("/metrics")
    counts = re.findall(r"^extproc_(?:picks|rejections)_total\{.* (\S+)$", page, re.MULTILINE)
    return sum(map(float, counts))


async def test_a_request_goes_where_its_adapter_is(client: Client, router: RouterProcess) -> None:
    """By the adapter's own name: two have their own entries, one is found by the wildcard."""
    before = await num_asked(router)
    answers = [await client.chat(name) for name in ("only-0", "bot", "lora/only-2")]
    models = [answer.headers["llm_provider-x-served-model"] for answer in answers]

    assert [answer.status for answer in answers] == [200, 200, 200]
    assert [served_by(answer) for answer in answers] == ["pod-0", "pod-1", "pod-2"]
    assert models == ["only-0", "only-1", "only-2"]
    assert await num_asked(router) == before + 3, "each is sent once"


@pytest.mark.parametrize(("name", "pod"), [("bot", "pod-1"), ("lora/only-2", "pod-2")])
async def test_a_stream_comes_from_where_the_adapter_is(
    client: Client, name: str, pod: str
) -> None:
    answer = await client.chat(name, stream=True, max_tokens=8)
    events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
    tokens = [
        choice["delta"].get("content")
        for event in events[:-1]
        for choice in json.loads(event)["choices"]
    ]

    assert answer.status == 200
    assert served_by(answer) == pod
    assert events[-1] == b"[DONE]"
    assert len([token for token in tokens if token]) == 8


async def test_an_unknown_adapter_is_404_in_openai_s_shape(client: Client) -> None:
    """With our message; LiteLLM's code is the status as text."""
    answer = await client.chat("lora/nobody")

    assert answer.status == 404
    assert answer.error_code == "404"
    assert "The model `nobody` does not exist" in answer.json["error"]["message"]


async def test_unknown_adapters_do_not_close_the_wildcard_for_the_others(client: Client) -> None:
    unknown = [(await client.chat("lora/nobody")).status for _ in range(10)]
    known = await client.chat("lora/only-2")

    assert set(unknown) == {404}
    assert (known.status, served_by(known)) == (200, "pod-2")


async def test_a_request_that_fails_is_sent_once(
    client: Client, dead_gateway: tuple[EnvoyProcess, RouterProcess]
) -> None:
    """Envoy has retries of its own; LiteLLM's on top of them, two by default, would multiply."""
    _envoy, router = dead_gateway
    before = await num_asked(router)
    answer = await client.chat("dead")

    assert answer.status == 503
    assert await num_asked(router) == before + 1


async def test_a_client_s_headers_do_not_reach_the_pods(
    client: Client, pods: list[RunningPod]
) -> None:
    """A session or an objective has to be set in LiteLLM's configuration."""
    answer = await client.chat("only-0", headers={"x-session": "s"})
    request = json.dumps(pods[0].pod.last_requests[-1])

    assert answer.status == 200
    assert "x-request-id" in request
    assert "x-session" not in request
