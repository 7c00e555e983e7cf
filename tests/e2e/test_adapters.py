"""Adapters that are declared, on fake pods behind a real Envoy: loaded, kept, waited for."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import Mode
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from tests.e2e.conftest import behind_envoy, router_config
from tests.e2e.harness import Answer, Client, RouterProcess
from tests.fakepods import running_pod, running_pods
from tests.waiting import eventually

PATHS = {"/adapters/a": 8, "/adapters/a-2": 8, "/adapters/b": 8, "/adapters/wide": 64}
"""What pods find on their disks, with ranks; they take up to 16."""


@dataclass
class Scene:
    """Some pods without adapters, a router and an Envoy."""

    client: Client
    router: RouterProcess
    pods: list[RunningPod]
    http: aiohttp.ClientSession

    async def listed(self, pod: RunningPod) -> set[str]:
        """The adapters that a pod lists."""
        async with self.http.get(f"http://{pod.address}/v1/models") as response:
            models = (await response.json())["data"]
        return {model["id"] for model in models if model["parent"]}

    async def until_answered(self, model: str) -> Answer:
        """The first answer to a model that is about to be declared."""

        async def answer() -> Answer | None:
            found = await self.client.chat(model)
            return found if found.status == 200 else None

        found: Answer = await eventually(answer)
        return found

    async def until_listed(self, pod: RunningPod, *names: str) -> None:
        async def is_listed() -> bool:
            return await self.listed(pod) >= set(names)

        await eventually(is_listed)


def route(name: str, **adapter: Any) -> dict[str, Any]:
    """A route that declares an adapter."""
    return {"name": name, "models": [name], "adapter": {"source": f"/adapters/{name}", **adapter}}


@asynccontextmanager
async def declaring(
    http: aiohttp.ClientSession,
    *routes: dict[str, Any],
    num_pods: int = 2,
    pod: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
    mode: Mode = Mode.ORIGINAL_DST,
    **sections: Any,
) -> AsyncIterator[Scene]:
    """Pods that find `PATHS`; `sizes` are what they and the router know of their places."""
    configs = [
        PodConfig(name=f"pod-{number}", ranks_by_path=PATHS, **(pod or {}), **(sizes or {}))
        for number in range(num_pods)
    ]
    async with running_pods(*configs) as pods:
        scrape = {"interval_s": 0.1, "models_interval_s": 0.2}
        config = {
            **router_config(pods, server={"drain_timeout_s": 1}, scrape=scrape, **sections),
            "routes": list(routes),
            "pods": sizes or {},
        }
        async with behind_envoy(config, http, mode, num_pods=num_pods) as (router, client):
            yield Scene(client, router, pods, http)


async def test_a_declared_adapter_is_loaded_on_every_pod_without_a_request(
    http: aiohttp.ClientSession,
) -> None:
    replicas = {"min": 2}
    async with declaring(http, route("a", replicas=replicas)) as scene:
        for pod in scene.pods:
            await scene.until_listed(pod, "a")
        assert (await scene.client.chat("a")).status == 200


async def test_a_lazy_adapter_is_loaded_by_its_first_request_which_waits_for_it(
    http: aiohttp.ClientSession,
) -> None:
    async with declaring(http, route("a", load="lazy")) as scene:
        assert [await scene.listed(pod) for pod in scene.pods] == [set(), set()]

        answers = await asyncio.gather(*(scene.client.chat("a") for _ in range(20)))

        assert {answer.status for answer in answers} == {200}


async def test_models_lists_what_is_declared_whether_it_is_loaded_or_not(
    http: aiohttp.ClientSession,
) -> None:
    async with declaring(http, route("a", load="lazy")) as scene:
        answer = await scene.client.request("GET", "/v1/models")
        assert [model["id"] for model in answer.json["data"]] == ["base", "a"]
        assert (await scene.client.request("GET", "/v1/models/a")).json["parent"] == "base"


async def test_an_adapter_that_cannot_be_loaded_is_a_503_with_the_reason_and_others_are_served(
    http: aiohttp.ClientSession,
) -> None:
    routes = [route("missing"), route("wide"), route("a")]
    async with declaring(http, *routes) as scene:
        answers = {name: await scene.client.chat(name) for name in ("missing", "wide", "a")}

        assert {name: answer.status for name, answer in answers.items()} == {
            "missing": 503,
            "wide": 503,
            "a": 200,
        }
        assert answers["missing"].error_code == "adapter_unavailable"
        assert "(files)" in answers["missing"].json["error"]["message"]
        assert "(refused)" in answers["wide"].json["error"]["message"]

        page = await scene.router.admin("/debug/adapters")
        reasons = {each["name"]: each["reason"] for each in page["adapters"]}
        assert reasons == {"missing": "files", "wide": "refused", "a": None}
        metrics = await scene.router.admin("/metrics")
        assert 'extproc_adapters{state="failed"} 2.0' in metrics
        assert 'extproc_adapters{state="ready"} 1.0' in metrics
        assert await scene.router.counter("extproc_adapter_calls_total") >= 3


async def test_a_pod_that_restarts_gets_its_adapters_again(http: aiohttp.ClientSession) -> None:
    async with declaring(http, route("a"), route("b"), num_pods=1) as scene:
        [pod] = scene.pods
        await scene.until_listed(pod, "a", "b")
        host, _, port = pod.address.rpartition(":")
        await pod.stop()
        async with running_pod(
            PodConfig(name="pod-0", ranks_by_path=PATHS), host, int(port)
        ) as again:
            await scene.until_listed(again, "a", "b")

            async def answers() -> bool:
                return (await scene.client.chat("a")).status == 200

            await eventually(answers)


@pytest.mark.long
async def test_undeclared_adapters_are_served_and_never_unloaded_or_refused_if_so_configured(
    http: aiohttp.ClientSession,
) -> None:
    own = {"adapters": {"own": "/adapters/b"}}
    async with declaring(http, route("a"), num_pods=1, pod=own) as scene:
        await scene.until_listed(scene.pods[0], "a")
        assert (await scene.client.chat("own")).status == 200
        assert "own" in await scene.listed(scene.pods[0])
    refusing = {"undeclared": "refuse"}
    async with declaring(http, route("a"), num_pods=1, pod=own, adapters=refusing) as scene:
        assert (await scene.client.chat("own")).status == 404
        assert (await scene.client.chat("base")).status == 200


async def test_a_new_version_takes_over_without_a_failed_request_and_the_old_one_goes(
    http: aiohttp.ClientSession,
) -> None:
    async with declaring(http, route("a", version="1"), num_pods=2) as scene:
        assert served_model(await scene.client.chat("a")) == "a@1"
        scene.router.change_config(routes=[route("a", source="/adapters/a-2", version="2")])
        seen: list[str] = []

        async def is_new() -> bool:
            answers = await asyncio.gather(*(scene.client.chat("a") for _ in range(5)))
            assert {answer.status for answer in answers} == {200}
            seen.extend(served_model(answer) for answer in answers)
            return seen[-1] == "a@2"

        await eventually(is_new)
        assert set(seen) <= {"a@1", "a@2"}

        async def is_gone() -> bool:
            lists = [await scene.listed(pod) for pod in scene.pods]
            return not any("a@1" in each for each in lists)

        await eventually(is_gone)
        answer = await scene.client.request("GET", "/v1/models")
        assert [model["id"] for model in answer.json["data"]] == ["base", "a"]


@pytest.mark.parametrize("mode", [Mode.ORIGINAL_DST, Mode.FULL_DUPLEX])
async def test_requests_that_wait_for_an_adapter_get_the_first_version_that_it_gets(
    http: aiohttp.ClientSession, mode: Mode
) -> None:
    async with declaring(http, route("a"), num_pods=1, mode=mode) as scene:
        [pod] = scene.pods
        host, _, port = pod.address.rpartition(":")
        await pod.stop()
        await eventually(lambda: serves(scene, "a", False))
        answers = [asyncio.create_task(scene.client.chat("a")) for _ in range(3)]
        await eventually(lambda: are_held(scene, 3))
        scene.router.change_config(routes=[route("a", version="1")])
        await eventually(lambda: serves(scene, "a@1", False))

        async with running_pod(PodConfig(name="pod-0", ranks_by_path=PATHS), host, int(port)):
            assert [served_model(await each) for each in answers] == ["a@1"] * 3


async def serves(scene: Scene, served: str, is_ready: bool) -> bool:
    """Whether an adapter is declared under a served name, and a pod has it or none has."""
    page = await scene.router.admin("/debug/adapters")
    [version] = [each["versions"][0] for each in page["adapters"]]
    return bool(version["name"] == served and (version["ready"] > 0) is is_ready)


async def are_held(scene: Scene, num_requests: int) -> bool:
    page = await scene.router.admin("/metrics")
    lines = [each for each in page.splitlines() if each.startswith("extproc_held_requests{")]
    return sum(float(each.split()[-1]) for each in lines) == num_requests


def served_model(answer: Answer) -> str:
    """The name that the pod read."""
    return answer.headers["x-served-model"]


# --- declared over HTTP -----------------------------------------------------------------------

TOKEN = {"authorization": "Bearer secret"}
TENANT = "x-llm-d-inference-fairness-id"


@asynccontextmanager
async def registering(
    http: aiohttp.ClientSession, folder: Path, store: dict[str, Any], **options: Any
) -> AsyncIterator[Scene]:
    """A gateway whose adapters are declared over HTTP, and kept in a store."""
    tokens = folder / "tokens"
    tokens.write_text("secret\n")
    section = {"store": store, "registration": {"token_file": str(tokens), "max_per_s": 100}}
    async with declaring(http, adapters=section, **options) as scene:
        yield scene


STORES = ["directory", "sqlite"]


def store_in(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / "store"
    if kind == "sqlite":
        return {"sqlite": {"file": str(path), "interval_s": 0.1}}
    path.mkdir()
    return {"directory": {"path": str(path), "interval_s": 0.1}}


async def post(scene: Scene, path: str, **body: Any) -> tuple[int, str]:
    url = f"{scene.router.admin_url}{path}"
    async with scene.http.post(url, json=body, headers=TOKEN) as response:
        return response.status, await response.text()


async def test_an_alias_its_weights_and_who_may_use_an_adapter_are_declared_over_http(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    trusted = {"trusted_headers": ["fairness_id"]}
    async with registering(http, tmp_path, store_in(tmp_path, "sqlite"), request=trusted) as scene:
        adapters = [
            {"name": "a", "source": "/adapters/a", "tenants": ["acme"]},
            {"name": "b", "source": "/adapters/b"},
        ]
        url = f"{scene.router.admin_url}/v1/adapters?wait=60"
        async with http.post(url, json=adapters, headers=TOKEN) as response:
            assert response.status == 200, await response.text()
        own, others = {TENANT: "acme"}, {TENANT: "other"}
        assert (await scene.client.chat("a", headers=own)).status == 200
        assert (await scene.client.chat("a", headers=others)).status == 404

        weights = [{"model": "a", "weight": 1}, {"model": "b", "weight": 0}]
        assert (await post(scene, "/v1/adapters", name="x", targets=weights))[0] == 201
        assert (await scene.until_answered("b")).status == 200
        before = await scene.client.chat("x", headers=own)
        hidden = await scene.client.chat("x", headers=others)
        weights[0]["weight"], weights[1]["weight"] = 0, 1
        headers = {**TOKEN, "If-Match": "*"}
        rolled = {"name": "x", "targets": weights}
        url = f"{scene.router.admin_url}/v1/adapters"
        async with http.post(url, json=rolled, headers=headers) as response:
            assert response.status == 200, await response.text()
        after = await scene.client.chat("x", headers=others)

        assert [each.status for each in (before, hidden, after)] == [200, 404, 200]
        assert [each.json["model"] for each in (before, after)] == ["a", "b"]


@pytest.mark.parametrize("state", ["dead", "hangs"])
async def test_without_a_router_nobody_gets_another_tenant_s_adapter(
    http: aiohttp.ClientSession, tmp_path: Path, state: str
) -> None:
    """Though Envoy knows pods that have it, and would serve them by its own choice."""
    options: dict[str, Any] = {
        "mode": Mode.OVERRIDE_HOST,
        "request": {"trusted_headers": ["fairness_id"]},
    }
    async with registering(http, tmp_path, store_in(tmp_path, "sqlite"), **options) as scene:
        private = {"name": "a", "source": "/adapters/a", "tenants": ["acme"]}
        assert (await post(scene, "/v1/adapters?wait=60", **private))[0] == 201
        own, other = {TENANT: "acme"}, {TENANT: "other"}
        assert (await scene.client.chat("a", headers=own)).status == 200
        assert (await scene.client.chat("a", headers=other)).status == 404

        if state == "dead":
            await scene.router.kill()
        else:
            scene.router.send(signal.SIGSTOP)
        answers = [await scene.client.chat("a", headers=each) for each in (other, {}, own)]
        scene.router.send(signal.SIGCONT)

    assert {answer.served_by for answer in answers} == {""}
    assert {answer.error_code for answer in answers} <= {"router_unavailable", "router_timeout"}


@pytest.mark.parametrize("kind", STORES)
async def test_an_adapter_is_registered_used_rolled_and_removed_over_http(
    http: aiohttp.ClientSession, tmp_path: Path, kind: str
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, kind)) as scene:
        assert (await scene.client.chat("a")).status == 404
        body = {"name": "a", "source": "/adapters/a", "version": "1"}
        assert (await post(scene, "/v1/adapters", **body))[0] == 201
        assert served_model(await scene.until_answered("a")) == "a@1"

        url = f"{scene.router.admin_url}/v1/adapters/a"
        async with http.get(url, headers=TOKEN) as response:
            tag = response.headers["etag"]
        second = {**body, "source": "/adapters/a-2", "version": "2"}
        assert (await post(scene, "/v1/adapters", **second))[0] == 409
        headers = {**TOKEN, "if-match": tag}
        rolled = f"{scene.router.admin_url}/v1/adapters"
        async with http.post(rolled, json=second, headers=headers) as response:
            assert response.status == 200

        async def is_rolled() -> bool:
            return served_model(await scene.client.chat("a")) == "a@2"

        await eventually(is_rolled)
        async with http.delete(url, headers=TOKEN) as response:
            assert response.status < 300

        async def is_unknown() -> bool:
            return (await scene.client.chat("a")).status == 404

        await eventually(is_unknown)

        async def is_unloaded() -> bool:
            lists = [await scene.listed(pod) for pod in scene.pods]
            return not any(lists)

        await eventually(is_unloaded)


async def test_vllms_own_path_answers_once_a_pod_lists_the_adapter(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, "directory")) as scene:
        load = {"lora_name": "a", "lora_path": "/adapters/a"}
        status, text = await post(scene, "/v1/load_lora_adapter", **load)
        assert (status, text) == (200, "Success: LoRA adapter 'a' added successfully.")
        assert any([await scene.listed(pod) for pod in scene.pods])
        assert (await scene.client.chat("a")).status == 200


async def test_a_router_that_restarts_knows_what_was_declared_and_what_was_deleted(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, "sqlite")) as scene:
        for name in ("a", "b"):
            await post(
                scene, "/v1/load_lora_adapter", lora_name=name, lora_path=f"/adapters/{name}"
            )
        await scene.router.kill()
        await scene.router.start()
        assert (await scene.until_answered("a")).status == 200
        assert (await post(scene, "/v1/unload_lora_adapter", lora_name="b"))[0] == 200

        async def is_unloaded() -> bool:
            lists = [await scene.listed(pod) for pod in scene.pods]
            return not any("b" in each for each in lists)

        await eventually(is_unloaded)


async def test_nobody_declares_without_a_token_nor_through_the_gateway(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, "directory")) as scene:
        url = f"{scene.router.admin_url}/v1/adapters"
        async with http.post(url, json={"name": "a"}) as response:
            assert response.status == 401
        body = b'{"lora_name": "a", "lora_path": "/adapters/a"}'
        headers = {**TOKEN, "content-type": "application/json"}
        for path in ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            answer = await scene.client.request("POST", path, body, headers=headers)
            assert answer.status == 404
    async with declaring(http, route("a")) as scene:
        url = f"{scene.router.admin_url}/v1/adapters"
        async with http.post(url, json={"name": "a"}, headers=TOKEN) as response:
            assert response.status == 404


@pytest.mark.long
async def test_adapters_of_a_pod_that_is_gone_are_loaded_on_the_others_where_they_do_not_fit(
    http: aiohttp.ClientSession,
) -> None:
    """Six adapters, and places for four: the idle ones make room."""
    names = [f"n{number}" for number in range(6)]
    routes = [route(name, source="/adapters/a") for name in names]
    sizes = {"max_loras": 2, "max_cpu_loras": 4}
    async with declaring(http, *routes, sizes=sizes) as scene:

        async def are_listed() -> bool:
            lists = [await scene.listed(pod) for pod in scene.pods]
            return set().union(*lists) == set(names)

        await eventually(are_listed)
        await scene.pods[0].kill()

        for name in names:  # those that are sent before the router notices fail
            await scene.until_answered(name)
        answers = [await scene.client.chat(name) for name in names]
        assert {answer.status for answer in answers} == {200}


@pytest.mark.long
async def test_where_more_are_asked_for_than_have_a_place_each_is_answered_in_the_end(
    http: aiohttp.ClientSession,
) -> None:
    """Eight adapters, and places for four: who is refused meanwhile is told when to come again."""
    names = [f"n{number}" for number in range(8)]
    routes = [route(name, source="/adapters/a", load="lazy") for name in names]
    sizes = {"max_loras": 2, "max_cpu_loras": 2}
    refused: list[Answer] = []

    async with declaring(http, *routes, sizes=sizes, adapters={"cold_wait_s": 0.5}) as scene:

        async def ask(name: str) -> None:
            async def is_answered() -> bool:
                answer = await scene.client.chat(name)
                if answer.status != 200:
                    refused.append(answer)
                return answer.status == 200

            await eventually(is_answered)

        await asyncio.gather(*map(ask, names))

    assert {answer.status for answer in refused} <= {429, 503}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
