"""Registration over real HTTP, on a real admin server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from extproc.adapters.registration import MAX_AT_ONCE, MAX_WAITING, Registration
from extproc.adapters.stores.content import StoreError, StoreFullError
from extproc.adapters.stores.sqlite import Sqlite
from extproc.adapters.stores.store import Store
from extproc.adapters.tokens import Tokens
from extproc.wire.httpserver import DEFAULT_HTTP_LIMITS, HttpLimits
from tests.service.adminport import admin_server
from tests.waiting import eventually

TOKEN = "secret-1"
A = {"name": "org/a", "source": "/adapters/a"}
B = {"name": "org/a", "source": "/adapters/b"}
PATHS = (
    ("POST", "/v1/adapters"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/adapters/a"),
    ("DELETE", "/v1/adapters/a"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
)


class Answer:
    """A response that has been read."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str]) -> None:
        self.status = status
        self.text = text
        self.headers = headers

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def code(self) -> str:
        error: dict[str, str] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error["code"]

    @property
    def tag(self) -> str:
        return self.headers["ETag"]


class Breakable(Sqlite):
    """A database that cannot be used while there is an error."""

    error: StoreError | None = None

    async def get(self, name: str) -> bytes | None:
        if self.error is not None:
            raise self.error
        return await super().get(name)


class Port:
    """An admin port with registration, and a client for it."""

    def __init__(
        self,
        folder: Path,
        *,
        error: StoreError | None = None,
        limits: HttpLimits = DEFAULT_HTTP_LIMITS,
        has_token_file: bool = True,
    ) -> None:
        self.now = 100.0
        self.failures: list[str] = []
        self.ready: asyncio.Future[bool] | None = None
        self.waited: list[tuple[str, float]] = []
        self.status: dict[str, str] = {}
        self.token_file = folder / "tokens"
        self.token_file.write_text(f"{TOKEN}\nsecret-2\n")
        contents = folder / "store"
        contents.mkdir()
        database = contents / "adapters.db"
        medium = Breakable(database, interval_s=1, clock=lambda: self.now)
        medium.error = error
        self.store = Store(medium)
        registration = Registration(
            self.store,
            Tokens(
                self.token_file,
                max_per_s=10,
                clock=lambda: self.now,
                on_failure=self.failures.append,
            ),
            status=lambda name: self.status or {"state": f"of {name}"},
            wait_until_ready=self._wait,
            why_not=lambda new: "the configuration has it" if new.name == "of/config" else "",
            ready_s=60,
        )

        self.server = admin_server(
            add_registration=registration.add_to if has_token_file else None,
            limits=limits,
        )

    async def _wait(self, name: str, timeout_s: float) -> bool:
        self.waited.append((name, timeout_s))
        return True if self.ready is None else await self.ready

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = TOKEN,
        **headers: str,
    ) -> Answer:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, URL(url, encoded=True), data=None if body is None else data, headers=headers
            ) as response,
        ):
            return Answer(response.status, await response.text(), response.headers)

    async def post(self, body: object, if_match: str | None = None) -> Answer:
        headers = {} if if_match is None else {"If-Match": if_match}
        return await self.ask("POST", "/v1/adapters", body, **headers)


@asynccontextmanager
async def started(port: Port) -> AsyncIterator[Port]:
    await port.store.look()
    await port.server.start()
    try:
        yield port
    finally:
        await port.server.stop()
        await port.store.aclose()


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    async with started(Port(tmp_path)) as running:
        yield running


# --- who may --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_without_a_token_file_there_are_no_such_paths(
    tmp_path: Path, method: str, path: str
) -> None:
    async with started(Port(tmp_path, has_token_file=False)) as port:
        assert (await port.ask(method, path, A)).status == 404


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("token", [None, "", "secret", "secret-1 secret-2", "SECRET-1"])
async def test_without_a_right_token_nothing_is_done(
    port: Port, method: str, path: str, token: str | None
) -> None:
    answer = await port.ask(method, path, A, token=token)

    assert (answer.status, answer.code) == (401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert port.store.entries == {}


async def test_another_scheme_is_no_token(port: Port) -> None:
    answer = await port.ask("GET", "/v1/adapters", token=None, Authorization=f"Basic {TOKEN}")

    assert answer.status == 401


async def test_tokens_are_exchanged_while_it_runs(port: Port) -> None:
    before = [(await port.ask("GET", "/v1/adapters", token=f"secret-{n}")).status for n in (1, 3)]
    port.token_file.write_text("secret-3\n")
    after = [(await port.ask("GET", "/v1/adapters", token=f"secret-{n}")).status for n in (1, 3)]

    assert (before, after) == ([200, 401], [401, 200])


@pytest.mark.parametrize("content", [None, "", "\n \n", "two words\n", "ü\n", "a\n" * 17])
async def test_a_token_file_that_cannot_be_used_lets_nobody_in_and_is_reported_once(
    port: Port, content: str | None
) -> None:
    assert (await port.ask("GET", "/v1/adapters")).status == 200
    if content is None:
        port.token_file.unlink()
    else:
        port.token_file.write_text(content)
    statuses = [(await port.ask("GET", "/v1/adapters")).status for _ in range(3)]
    empty = (await port.ask("GET", "/v1/adapters", token="")).status
    port.token_file.write_text(f"{TOKEN}\n")

    assert ([*statuses, empty], len(port.failures)) == ([401] * 4, 1)
    assert (await port.ask("GET", "/v1/adapters")).status == 200


async def test_each_token_has_ten_requests_a_second(port: Port) -> None:
    answers = [await port.ask("GET", "/v1/adapters/x") for _ in range(30)]
    other = await port.ask("GET", "/v1/adapters", token="secret-2")
    port.now += 0.5
    later = [(await port.ask("GET", "/v1/adapters")).status for _ in range(6)]

    assert [each.status for each in answers] == [404] * 10 + [429] * 20
    assert answers[-1].headers["Retry-After"] == "1"
    assert other.status == 200
    assert later == [200] * 5 + [429]


# --- declaring ------------------------------------------------------------------------------------


async def test_an_adapter_is_declared_shown_replaced_and_deleted(port: Port) -> None:
    path = "/v1/adapters/org/a"
    created = await port.post(A)
    same = await port.post(A)
    shown = await port.ask("GET", path)
    replaced = await port.post(B, created.tag)
    listed = (await port.ask("GET", "/v1/adapters")).json
    deleted = await port.ask("DELETE", path, **{"If-Match": replaced.tag})
    gone = await port.ask("DELETE", path)

    assert [each.status for each in (created, same, shown, replaced)] == [201, 200, 200, 200]
    assert [each.json["change"] for each in (created, same, replaced)] == [
        "created",
        "none",
        "replaced",
    ]
    assert created.tag == same.tag == shown.tag != replaced.tag
    assert listed["object"] == "list"
    assert listed["data"] == [
        {
            **B,
            "version": "",
            "base": "",
            "rank": None,
            "replicas": {"min": 1, "max": None},
            "load": "auto",
            "object": "adapter",
            "deleted": False,
            "tag": replaced.tag.strip('"'),
            "status": {"state": "of org/a"},
        }
    ]
    assert (deleted.status, gone.status, gone.code) == (204, 404, "adapter_not_found")


async def test_what_is_deleted_is_shown_until_it_is_forgotten(port: Port) -> None:
    await port.post(A)
    await port.ask("DELETE", "/v1/adapters/org/a")
    deleted = await port.ask("GET", "/v1/adapters/org/a")
    assert (deleted.status, "ETag" in deleted.headers) == (410, False), "nothing to replace"
    await port.store.forget("org/a")

    assert deleted.json["deleted"] is True
    assert (await port.ask("GET", "/v1/adapters/org/a")).status == 404


async def test_another_content_is_409_and_with_a_wrong_tag_412(port: Port) -> None:
    created = await port.post(A)
    conflict, wrong = await port.post(B), await port.post(B, '"0"')
    unknown = await port.post({"name": "new"}, "*")
    deletion = await port.ask("DELETE", "/v1/adapters/org/a", **{"If-Match": '"0"'})
    anything = await port.post(B, "*")

    assert (conflict.status, conflict.code, conflict.tag) == (409, "conflict", created.tag)
    assert (wrong.status, wrong.code, wrong.tag) == (412, "precondition_failed", created.tag)
    assert (unknown.status, deletion.status, anything.status) == (412, 412, 200)
    assert port.store.entries.keys() == {"org/a"}


@pytest.mark.parametrize(("first", "second"), [("sql", "sql@2"), ("sql@2", "sql")])
async def test_names_that_pods_could_mistake_for_each_other_are_a_409(
    port: Port, first: str, second: str
) -> None:
    answers = [
        await port.post({"name": first}),
        await port.post({"name": second, "version": "" if "@" in second else "2"}),
        await port.ask("POST", LOAD, {"lora_name": second, "lora_path": "/x"}),
    ]

    assert [each.status for each in answers] == [201, 409, 409]
    assert f"{first}, which is declared" in answers[1].json["error"]["message"]
    assert "If-Match" not in answers[1].text


async def test_what_would_not_count_beside_the_configuration_is_a_409(port: Port) -> None:
    answers = [
        await port.post({"name": "of/config"}),
        await port.ask("POST", LOAD, {"lora_name": "of/config", "lora_path": "/x"}),
    ]

    assert [(each.status, each.code) for each in answers] == [(409, "conflict")] * 2
    assert "the configuration has it" in answers[0].json["error"]["message"]
    assert port.store.entries == {}


@pytest.mark.parametrize("name", ["a", "org/name", "a b", "ü", "%2F", "a/../b", "..", "x?y", "+"])
async def test_any_name_can_be_asked_for(port: Port, name: str) -> None:
    await port.post({"name": name})
    shown = await port.ask("GET", f"/v1/adapters/{quote(name, safe='').replace('.', '%2E')}")

    assert (shown.status, shown.json["name"]) == (200, name)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not a declaration"),
        (b"{", "not a declaration"),
        (b"[" * 8_000, "not a declaration"),
        ({"name": "a,b"}, "without commas"),
        ({"name": "a", "source": "/adapters/../etc"}, "must be the absolute path of a directory"),
        ({"name": "a", "source": "s3://bucket/a"}, "mount the files"),
        ({"name": "a", "replcias": {}}, "unknown field `replcias`"),
        ({"name": "a", "origin": "config"}, "unknown field `origin`"),
    ],
)
async def test_what_cannot_stand_is_a_400_with_the_reason(
    port: Port, body: object, said: str
) -> None:
    answer = await port.post(body)

    assert (answer.status, answer.code) == (400, "invalid_adapter")
    assert said in answer.json["error"]["message"]


async def test_a_body_over_the_limit_is_413(port: Port) -> None:
    answer = await port.post({"name": "a", "source": "/" + "a" * 65_536})

    assert (answer.status, answer.code) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreFullError("no space left"), 507, "store_full"),
        (StoreError("connection refused"), 503, "store_unavailable"),
    ],
)
async def test_a_store_that_takes_nothing_is_503_or_507(
    tmp_path: Path, error: StoreError, status: int, code: str
) -> None:
    async with started(Port(tmp_path, error=error)) as port:
        answers = [await port.post(A), await port.ask("DELETE", "/v1/adapters/org/a")]

    assert [(each.status, each.code) for each in answers] == [(status, code)] * 2
    assert str(error) in answers[0].json["error"]["message"]


# --- vLLM's paths ---------------------------------------------------------------------------------

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASKED = {"lora_name": "x", "lora_path": "/adapters/x"}


async def test_vllms_paths_answer_in_its_words(port: Port) -> None:
    loaded = await port.ask("POST", LOAD, ASKED)
    again = await port.ask("POST", LOAD, ASKED)
    unloaded = await port.ask("POST", UNLOAD, {"lora_name": "x", "lora_int_id": 7})
    unknown = await port.ask("POST", UNLOAD, {"lora_name": "x"})

    assert (loaded.status, loaded.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    assert loaded.headers["Content-Type"].startswith("text/plain")
    assert again.text == loaded.text
    assert unloaded.text == "Success: LoRA adapter 'x' removed successfully."
    assert (unknown.status, unknown.code) == (404, "NotFoundError")
    assert port.waited == [("x", 60.0)] * 2


async def test_a_load_is_answered_when_enough_pods_list_it(port: Port) -> None:
    port.ready = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(port.ask("POST", LOAD, ASKED))
    await eventually(lambda: port.waited)
    was_done = asking.done()
    port.ready.set_result(True)

    assert (was_done, (await asking).status) == (False, 200)


@pytest.mark.parametrize(
    ("status", "answered", "code", "said"),
    [
        ({}, 504, "not_ready", "they still may."),
        (
            {"state": "loading", "reason": "timeout", "message": "p1: 5 s"},
            504,
            "not_ready",
            "they still may (timeout: p1: 5 s).",
        ),
        (
            {"state": "failed", "reason": "refused", "message": "p1: rank 64"},
            422,
            "adapter_failed",
            "no pod can load it: refused: p1: rank 64.",
        ),
    ],
)
async def test_a_load_that_does_not_become_ready_says_why_and_stays_declared(
    port: Port, status: dict[str, str], answered: int, code: str, said: str
) -> None:
    port.ready = asyncio.get_running_loop().create_future()
    port.ready.set_result(False)
    port.status = status
    answer = await port.ask("POST", LOAD, ASKED)

    assert (answer.status, answer.code) == (answered, code)
    assert answer.json["error"]["message"].endswith(said)
    assert port.store.entries["x"].declaration.source == "/adapters/x"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({**ASKED, "load_inplace": True}, 400, "load_inplace"),
        ({"lora_name": "x"}, 400, "InvalidUserInput"),
        ({"lora_path": "/x"}, 400, "InvalidUserInput"),
        ({"lora_name": 1, "lora_path": "/x"}, 400, "invalid_body"),
        (b"{", 400, "invalid_body"),
        ({"lora_name": "x", "lora_path": "../x"}, 400, "invalid_adapter"),
    ],
)
async def test_a_load_that_cannot_be_is_refused(
    port: Port, body: object, status: int, code: str
) -> None:
    answer = await port.ask("POST", LOAD, body)

    assert (answer.status, answer.code) == (status, code)
    assert port.store.entries == {}


async def test_a_load_of_another_path_under_the_same_name_is_409(port: Port) -> None:
    await port.ask("POST", LOAD, ASKED)
    answer = await port.ask("POST", LOAD, {**ASKED, "lora_path": "/adapters/y"})

    assert (answer.status, answer.code) == (409, "conflict")


async def test_a_repository_of_the_hub_is_declared_as_one(port: Port) -> None:
    await port.ask("POST", LOAD, {"lora_name": "x", "lora_path": "org/repo"})

    assert port.store.entries["x"].declaration.source == "hf:org/repo"


async def test_loads_that_wait_keep_nobody_else_out(port: Port) -> None:
    """One token's part of the waiting is taken: its other requests and other tokens' go on."""
    port.ready = asyncio.get_running_loop().create_future()
    asking = []
    for number in range(MAX_WAITING):
        port.now += 1
        asked = {"lora_name": f"x{number}", "lora_path": "/x"}
        asking.append(asyncio.ensure_future(port.ask("POST", LOAD, asked)))
        await eventually(lambda: len(port.waited) + sum(map(asyncio.Future.done, asking)) > number)  # noqa: B023
    refused = [each.result() for each in asking if each.done()]
    port.now += 1
    own = [await port.ask("GET", path) for path in ("/v1/adapters", "/healthz", "/metrics")]
    other = asyncio.ensure_future(port.ask("POST", LOAD, ASKED, token="secret-2"))
    await eventually(lambda: port.waited[-1][0] == "x")
    port.ready.set_result(True)
    statuses = [(await each).status for each in asking]

    assert len(refused) == MAX_WAITING // 2  # of two tokens
    assert {(each.status, each.code) for each in refused} == {(429, "too_many_requests")}
    assert refused[0].headers["Retry-After"] == "1"
    assert port.store.entries.keys() == {f"x{n}" for n in range(MAX_WAITING // 2)} | {"x"}
    assert [each.status for each in own] == [200] * 3
    assert (await other).status == 200
    assert statuses.count(200) == MAX_WAITING // 2


async def test_bodies_that_do_not_come_take_a_tokens_part_alone(port: Port) -> None:
    head = (
        "POST /v1/adapters HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        f"Authorization: Bearer {TOKEN}\r\n\r\n"
    )
    writers = []
    for _ in range(MAX_AT_ONCE // 2 + 1):
        port.now += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
        writer.write(head.encode())
        writers.append(writer)
    answer = await reader.readline()
    port.now += 1
    own, other = [await port.ask("GET", "/v1/adapters", token=f"secret-{n}") for n in (1, 2)]
    health = await port.ask("GET", "/healthz", token=None)
    for each in writers:
        each.close()

    assert answer.startswith(b"HTTP/1.1 429 ")
    assert [each.status for each in (own, other, health)] == [429, 200, 200]


async def test_a_long_wait_with_a_body_that_came_later_is_not_dropped(tmp_path: Path) -> None:
    """The limit on the time of requests is one on their headers."""
    limits = HttpLimits(request_s=0.3, tick_s=0.05)
    async with started(Port(tmp_path, limits=limits)) as port:
        port.ready = asyncio.get_running_loop().create_future()
        body = json.dumps(ASKED).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
        writer.write(
            f"POST {LOAD} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
        )
        await asyncio.sleep(0.1)
        writer.write(body)
        await eventually(lambda: port.waited)
        await asyncio.sleep(0.5)
        port.ready.set_result(True)
        line = await asyncio.wait_for(reader.readline(), 60)
        writer.close()

    assert line == b"HTTP/1.1 200 OK\r\n"


async def test_a_body_that_never_comes_is_a_408(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.adapters.registration.BODY_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
    writer.write(
        f"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
        "content-length: 10\r\n\r\n{".encode()
    )
    line = await asyncio.wait_for(reader.readline(), 60)
    writer.close()

    assert line.startswith(b"HTTP/1.1 408 ")
