"""Registration over real HTTP, on a real admin server."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from extproc.adapters.changes import Changes
from extproc.adapters.declared import ITEMS_A_PLACE, Declaration
from extproc.adapters.registration import MAX_AT_ONCE, MAX_WAITING, Registration
from extproc.adapters.scope import TokenFacts, TokenScope, Users
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
        assert error.keys() - {"items"} == {"message", "type", "param", "code"}
        return error["code"]

    @property
    def tag(self) -> str:
        return self.headers["ETag"]


class Breakable(Sqlite):
    """A database that cannot be used while there is an error."""

    error: StoreError | None = None
    fail_at = 0
    """Which swap from now on fails, from 1; with `fails_on` all later ones do, too."""
    fails_on = False

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        self.fail_at -= 1
        if self.fail_at == 0 or (self.fails_on and self.fail_at < 0):
            raise StoreError("broken off")
        return await super().swap(name, old, new)

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
        self.changes: list[str] = []
        self.ready: asyncio.Future[bool] | None = None
        self.waited: list[tuple[str, float]] = []
        self.status: dict[str, str] = {}
        self.token_file = folder / "tokens"
        self.token_file.write_text(f"{TOKEN}\nsecret-2\n")
        contents = folder / "store"
        contents.mkdir()
        database = contents / "adapters.db"
        self.medium = medium = Breakable(database, interval_s=1, clock=lambda: self.now)
        medium.error = error
        self.store = Store(medium)
        tokens = Tokens(
            self.token_file, max_per_s=10, clock=lambda: self.now, on_failure=self.failures.append
        )
        self.changing = Changes(
            self.store,
            tokens,
            lambda new: "the configuration has it" if new.name == "of/config" else "",
            TokenFacts(self._has_others, lambda name: name == "base", lambda name: None),
            self.changes.append,
        )
        registration = Registration(
            self.store,
            tokens,
            self.changing,
            status=lambda name: self.status or {"state": f"of {name}"},
            wait_until_ready=self._wait,
            ready_s=60,
        )

        self.server = admin_server(
            add_registration=registration.add_to if has_token_file else None,
            limits=limits,
        )

    def _has_others(self, source: str, scope: TokenScope) -> bool:
        entries = self.store.entries.items()
        users = Users({name: each.declaration.source for name, each in entries})
        return users.is_used_outside(source, scope)

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
    await port.store.poll()
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
            "tenants": [],
            "priority": None,
            "targets": [],
            "id": "org/a",
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
        (b"[" * 8_000, "not a list of declarations"),
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


async def test_a_compressed_body_is_a_415_and_never_unpacked(port: Port) -> None:
    body = gzip.compress(json.dumps(A).encode())
    for path in ("/v1/adapters", LOAD, UNLOAD):
        answer = await port.ask("POST", path, body, **{"Content-Encoding": "gzip"})
        assert (answer.status, answer.code) == (415, "unsupported_content_encoding")
    as_it_is = await port.ask("POST", "/v1/adapters", A, **{"Content-Encoding": "identity"})

    assert as_it_is.status == 201


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


async def test_a_full_store_is_told_until_there_is_room_or_another_content(tmp_path: Path) -> None:
    async with started(Port(tmp_path)) as port:
        told = []
        for error, method, path, body in (
            (None, "POST", "", A),
            (StoreFullError("no space left"), "POST", "", [A, {"name": "b"}]),
            (StoreFullError("disk full"), "DELETE", "/org/a", None),
            (StoreError("connection refused"), "POST", "", {"name": "c"}),
            (None, "POST", "", {"name": "d"}),
        ):
            port.medium.error = error
            await port.ask(method, f"/v1/adapters{path}", body)
            told.append(port.changing.full)

    assert told == ["", "no space left", "disk full", "disk full", ""]
    said = [each.partition(": ")[2] for each in port.changes if "no room" in each]
    assert said == ["no room for org/a, b: no space left", "no room for org/a: disk full"]


async def test_a_full_store_is_not_told_once_something_else_is_in_it(tmp_path: Path) -> None:
    async with started(Port(tmp_path)) as port:
        port.medium.error = StoreFullError("no space left")
        await port.post(A)
        port.medium.error = None
        await port.store.put(Declaration("elsewhere", origin="store"))

    assert port.changing.full == ""


# --- several at once, and pages of them -----------------------------------------------------------


async def test_a_list_is_declared_as_a_whole(port: Port) -> None:
    first = await port.post([A, {"name": "b", "priority": 5}])
    refused = await port.post([A, {"name": "b", "priority": 6}])
    again = await port.ask(
        "POST", "/v1/adapters?replace=true", [A, {"name": "b", "priority": 6}, {"name": "c"}]
    )

    assert (first.status, first.json["object"]) == (200, "list")
    assert [(each["id"], each["change"]) for each in first.json["data"]] == [
        ("org/a", "created"),
        ("b", "created"),
    ]
    assert [each["change"] for each in again.json["data"]] == ["none", "replaced", "created"]
    assert refused.status == 409
    assert "replace=true" in refused.json["error"]["items"][0]["message"]
    assert port.store.entries["b"].declaration.terms.priority == 6


async def test_of_a_list_with_errors_nothing_is_declared_and_each_has_its_reason(
    port: Port,
) -> None:
    await port.post({"name": "taken", "source": "/adapters/x"})
    answer = await port.post(
        [
            A,
            {"name": "a,b"},
            {"name": "taken", "source": "/adapters/y"},
            {"name": "of/config"},
            7,
        ]
    )
    late = await port.post([A, {"name": "taken", "source": "/adapters/y"}, A])
    items = answer.json["error"]["items"]

    assert (answer.status, answer.json["error"]["code"]) == (400, "list_refused")
    assert [(each["index"], each["status"], each["code"]) for each in items] == [
        (1, 400, "invalid_adapter"),
        (3, 409, "conflict"),
        (4, 400, "invalid_adapter"),
    ]
    assert [(each["index"], each["name"]) for each in late.json["error"]["items"]] == [
        (1, "taken"),
        (2, "org/a"),
    ]
    assert port.store.entries.keys() == {"taken"}


@pytest.mark.parametrize(
    ("body", "if_match", "code"),
    [
        ([], None, "invalid_body"),
        ([{"name": f"a{n}"} for n in range(1001)], None, "invalid_body"),
        ([A], "*", "invalid_if_match"),
        (b"[{", None, "invalid_adapter"),
    ],
)
async def test_a_list_that_is_none_is_a_400(
    port: Port, body: object, if_match: str | None, code: str
) -> None:
    answer = await port.post(body, if_match)

    assert (answer.status, answer.code) == (400, code)
    assert port.store.entries == {}


async def test_a_list_may_be_larger_than_a_declaration_and_has_a_limit(port: Port) -> None:
    many = [{"name": f"a{n}", "source": f"/adapters/{n}"} for n in range(1000)]
    answers = [await port.post(many), await port.post(b"[" + b" " * 262_144)]

    assert [each.status for each in answers] == [200, 413]
    assert len(port.store.entries) == 1000


async def test_what_was_written_of_a_list_is_taken_back_where_the_store_fails(
    port: Port,
) -> None:
    await port.post({"name": "a", "source": "/adapters/1"})
    port.medium.fail_at = 2
    edit = {"name": "a", "source": "/adapters/2"}
    failed = await port.ask(
        "POST", "/v1/adapters?replace=true", [edit, {"name": "b"}, {"name": "c"}]
    )
    found = [await port.ask("GET", f"/v1/adapters/{name}") for name in "abc"]

    assert (failed.status, failed.code) == (503, "store_unavailable")
    assert "could not be taken back" not in failed.text
    assert [each.status for each in found] == [200, 404, 404]
    assert found[0].json["source"] == "/adapters/1"


async def test_what_cannot_be_taken_back_is_named(port: Port) -> None:
    port.medium.fail_at, port.medium.fails_on = 2, True
    failed = await port.post([{"name": "b"}, {"name": "c"}])

    assert failed.status == 503
    assert "these could not be taken back: b" in failed.json["error"]["message"]


async def test_a_list_is_shown_in_pages_as_openai_has_them(port: Port) -> None:
    await port.post([{"name": name} for name in "abcde"])
    pages, after = [], ""
    while True:
        page = (await port.ask("GET", f"/v1/adapters?limit=2&after={after}")).json
        pages.append([each["id"] for each in page["data"]])
        assert (page["first_id"], page["last_id"]) == (pages[-1][0], pages[-1][-1])
        after = page["last_id"]
        if not page["has_more"]:
            break
    whole = (await port.ask("GET", "/v1/adapters")).json
    beyond = (await port.ask("GET", "/v1/adapters?after=e")).json

    assert pages == [["a", "b"], ["c", "d"], ["e"]]
    assert ([each["id"] for each in whole["data"]], whole["has_more"]) == (list("abcde"), False)
    assert (beyond["data"], beyond["first_id"], beyond["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    "limit", ["0", "-1", "x", "", "10001", "9" * 30, "1.5", f"{1:09}{0:05000}"]
)
async def test_a_limit_that_is_none_is_a_400(port: Port, limit: str) -> None:
    answer = await port.ask("GET", f"/v1/adapters?limit={limit}")

    assert (answer.status, answer.code) == (400, "invalid_query")


# --- terms ----------------------------------------------------------------------------------------


async def test_terms_are_declared_and_shown(port: Port) -> None:
    body = {**A, "tenants": ["b", "a"], "priority": -3}
    alias = {"name": "x", "priority": 2, "targets": [{"model": "org/a", "weight": 9.0}]}
    await port.post([body, alias])
    adapter, canary = [(await port.ask("GET", f"/v1/adapters/{n}")).json for n in ("org/a", "x")]

    assert (adapter["tenants"], adapter["priority"]) == (["a", "b"], -3)
    assert (canary["targets"], canary["priority"]) == (alias["targets"], 2)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"priority": 2**31}, "must be from"),
        ({"tenants": [""]}, "must have 1 to 253 characters"),
        ({"tenants": [f"t{n}" for n in range(257)]}, "must be from 0 to 256"),
        ({"targets": [{"model": "a*"}]}, "without *"),
        ({"targets": [{"model": "a", "weight": -1}]}, "must be from 0"),
        ({"targets": [{"model": "a", "weight": 0}, {"model": "b"}]}, "a weight above 0"),
        ({"targets": [{"model": "a", "wieght": 1}]}, "unknown field `wieght`"),
        ({"targets": [{"model": "a"}] * 101}, "must be from 0 to 100"),
        ({"targets": [{"model": "a"}], "source": "/adapters/a"}, "go with `name`"),
        ({"targets": [{"model": "a"}], "tenants": ["t"]}, "go with `name`"),
    ],
)
async def test_terms_that_cannot_stand_are_a_400_with_the_reason(
    port: Port, terms: dict[str, object], said: str
) -> None:
    answer = await port.post({"name": "x", **terms})

    assert (answer.status, answer.code) == (400, "invalid_adapter")
    assert said in answer.json["error"]["message"]


async def test_an_adapter_does_not_become_an_alias_unseen(port: Port) -> None:
    alias = {"name": "org/a", "targets": [{"model": "base"}]}
    await port.post(A)
    refused = await port.post(alias, "*")
    await port.ask("DELETE", "/v1/adapters/org/a")
    too_soon = await port.post(alias)
    await port.store.forget("org/a")
    made = await port.post(alias)
    gone = await port.ask("DELETE", "/v1/adapters/org/a")

    assert [each.status for each in (refused, too_soon, made, gone)] == [412, 409, 201, 204]
    assert "org/a is an adapter: delete it first" in refused.json["error"]["message"]
    assert port.store.entries == {}, "no pod has anything of an alias that it could let go"


# --- waiting --------------------------------------------------------------------------------------


async def test_a_declaration_waits_until_pods_list_the_adapter(port: Port) -> None:
    port.ready = asyncio.get_running_loop().create_future()
    asking = asyncio.ensure_future(port.ask("POST", "/v1/adapters?wait=7.5", A))
    await eventually(lambda: port.waited)
    was_done = asking.done()
    port.ready.set_result(True)
    answer = await asking

    assert (was_done, answer.status, port.waited) == (False, 201, [("org/a", 7.5)])
    assert answer.json["status"] == {"state": "of org/a"}


@pytest.mark.parametrize(
    ("state", "status", "code"), [("failed", 422, "adapter_failed"), ("loading", 504, "not_ready")]
)
async def test_what_is_not_loaded_in_time_is_answered_with_the_reason(
    port: Port, state: str, status: int, code: str
) -> None:
    port.ready = asyncio.get_running_loop().create_future()
    port.ready.set_result(False)
    port.status = {"state": state, "reason": "refused", "message": "p1: rank 64"}
    one = await port.ask("POST", "/v1/adapters?wait=3", A)
    several = await port.ask("POST", "/v1/adapters?wait=3", [A, {"name": "b"}])
    (first, second) = several.json["error"]["items"]

    assert (one.status, one.code) == (status, code)
    assert "refused: p1: rank 64" in one.json["error"]["message"]
    assert (several.status, first["code"], second["code"]) == (status, code, code)
    assert port.store.entries.keys() == {"org/a", "b"}


@pytest.mark.parametrize("wait", ["x", "", "-1", "nan", "inf", "601"])
async def test_a_wait_that_is_no_time_is_a_400_and_nothing_is_declared(
    port: Port, wait: str
) -> None:
    answer = await port.ask("POST", f"/v1/adapters?wait={wait}", A)

    assert (answer.status, answer.code) == (400, "invalid_query")
    assert port.store.entries == {}


async def test_an_alias_has_nothing_to_wait_for(port: Port) -> None:
    alias = {"name": "x", "targets": [{"model": "base"}]}
    answer = await port.ask("POST", "/v1/adapters?wait=3", alias)

    assert (answer.status, port.waited) == (201, [])


# --- who changed what, and who may ---------------------------------------------------------------


async def test_each_change_is_told_with_token_and_address_and_never_the_secret(
    port: Port,
) -> None:
    port.token_file.write_text(f"{TOKEN} name=ci\nsecret-2\n")
    created = await port.post(A)
    await port.post(A)
    await port.ask("POST", "/v1/adapters", B, **{"If-Match": created.tag})
    await port.ask(
        "DELETE", "/v1/adapters/org/a", token="secret-2", **{"X-Forwarded-For": "10.0.0.7"}
    )
    await port.ask("GET", "/v1/adapters")
    await port.post({"name": "a,b"})

    assert port.changes == [
        'ci at 127.0.0.1: created org/a: {"name":"org/a","source":"/adapters/a"}',
        'ci at 127.0.0.1: replaced org/a: {"name":"org/a","source":"/adapters/b"}',
        "token-2 at 127.0.0.1, which says it is for '10.0.0.7': deleted org/a",
    ]
    assert "secret" not in "".join(port.changes)


async def test_a_token_changes_and_sees_the_names_that_it_is_limited_to(port: Port) -> None:
    port.token_file.write_text(f"{TOKEN}\nsecret-2 name=sql allow=sql-*,org/sql\n")
    await port.post([A, {"name": "sql-1"}])
    limited = {"token": "secret-2"}
    answers = [
        await port.ask("POST", "/v1/adapters", A, **limited),
        await port.ask("GET", "/v1/adapters/org/a", **limited),
        await port.ask("DELETE", "/v1/adapters/org/a", **limited),
        await port.ask("POST", LOAD, {"lora_name": "law", "lora_path": "/x"}, **limited),
        await port.ask("POST", UNLOAD, {"lora_name": "org/a"}, **limited),
        await port.ask("POST", "/v1/adapters", {"name": "sql-"}, **limited),
        await port.ask("POST", "/v1/adapters", {"name": "org/sql"}, **limited),
    ]
    bulk = await port.ask("POST", "/v1/adapters", [{"name": "sql-2"}, {"name": "x"}], **limited)
    seen = (await port.ask("GET", "/v1/adapters", **limited)).json["data"]

    assert [each.status for each in answers] == [403] * 5 + [201] * 2
    assert answers[0].code == "name_not_allowed"
    assert "sql at 127.0.0.1: refused POST of org/a" in port.changes
    assert (bulk.status, [each["index"] for each in bulk.json["error"]["items"]]) == (403, [1])
    assert [each["id"] for each in seen] == ["org/sql", "sql-", "sql-1"]
    assert port.store.entries.keys() == {"org/a", "sql-1", "sql-", "org/sql"}


@pytest.mark.parametrize(
    "line",
    [
        "t name=",
        "t name=a,b",
        "t allow=",
        "t allow=a,,b",
        "t who=a",
        "t name=a name",
        "t name=a name=b",
        "t\nu name=token-1",
        "t sources=",
        "t targets=a,",
        "t max_priority=",
        "t max_priority=1.5",
        "t max_priority=2147483648",
        "t max_declarations=-1",
        "t max_declarations=10001",
        "t max_declarations=1 max_declarations=2",
        "t allow=" + ",".join(f"a{n}" for n in range(101)),
    ],
)
async def test_a_line_of_the_token_file_that_cannot_be_used_lets_nobody_in(
    port: Port, line: str
) -> None:
    port.token_file.write_text(f"{line}\n")

    assert (await port.ask("GET", "/v1/adapters", token="t")).status == 401
    assert len(port.failures) == 1


LIMITED = f"{TOKEN} name=all\nsecret-a name=a allow=a-*\nsecret-b name=b allow=b-*\n"
PRIVATE = {"name": "b-private", "source": "/adapters/b-private", "tenants": ["bee"]}


@pytest.mark.parametrize(
    ("declared", "code"),
    [
        ({"name": "a-copy", "source": "/adapters/b-private"}, "source_not_allowed"),
        ({"name": "a-copy", "source": "/adapters/./b-private//"}, "source_not_allowed"),
        ({"name": "a-copy", "source": "/adapters/b-private/last"}, "source_not_allowed"),
        ({"name": "a-copy", "source": "/adapters"}, "source_not_allowed"),
        ({"name": "a-alias", "targets": [{"model": "b-private"}]}, "target_not_allowed"),
        (
            {"name": "a-alias", "targets": [{"model": "base"}], "priority": 1},
            "priority_not_allowed",
        ),
        ({"name": "a-first", "source": "/a", "priority": 2**31 - 1}, "priority_not_allowed"),
        ({"name": "b-private", "source": "/a"}, "name_not_allowed"),
        ({"name": "b-private@a-2", "source": "/a"}, "name_not_allowed"),
    ],
)
async def test_a_limited_token_declares_nothing_of_others_and_nothing_above_them(
    port: Port, declared: dict[str, Any], code: str
) -> None:
    """Neither alone nor in a list, as something new nor as a change, nor by vLLM's path."""
    port.token_file.write_text(LIMITED)
    await port.ask("POST", "/v1/adapters", PRIVATE, token="secret-b")
    before = dict(port.store.entries)
    answers = [await port.ask("POST", "/v1/adapters", declared, token="secret-a")]
    if declared["name"].startswith("a-") and "targets" not in declared:
        await port.post({"name": declared["name"], "source": "/a"})
        before = dict(port.store.entries)
        again = {**declared, "version": "2"}
        answers.append(
            await port.ask("POST", "/v1/adapters", again, token="secret-a", **{"If-Match": "*"})
        )
        body = {"lora_name": "a-new", "lora_path": declared["source"]}
        if "priority" not in declared:
            answers.append(await port.ask("POST", LOAD, body, token="secret-a"))
    listed = [{"name": "a-fine", "source": "/a"}, declared]
    bulk = await port.ask("POST", "/v1/adapters?replace=true", listed, token="secret-a")

    assert {(each.status, each.code) for each in answers} == {(403, code)}
    [item] = bulk.json["error"]["items"]
    assert (bulk.status, item["index"], item["code"]) == (403, 1, code)
    assert dict(port.store.entries) == before
    unlimited = await port.ask("POST", "/v1/adapters?replace=true", [declared])
    assert unlimited.status in (200, 409)


async def test_a_tokens_line_says_what_it_may_declare_beside_its_names(port: Port) -> None:
    options = "sources=/adapters/a-*,hf:team-a/* targets=b-* max_priority=5 max_declarations=2"
    port.token_file.write_text(f"{TOKEN}\nsecret-a name=a allow=a-* {options}\n")
    asked = {
        "source_not_allowed": {"name": "a-1", "source": "/elsewhere/a"},
        "priority_not_allowed": {"name": "a-1", "source": "/adapters/a-1", "priority": 6},
        "target_not_allowed": {"name": "a-1", "targets": [{"model": "c"}]},
    }
    for code, declared in asked.items():
        answer = await port.ask("POST", "/v1/adapters", declared, token="secret-a")
        assert (answer.status, answer.code) == (403, code)
    for declared in (
        {"name": "a-1", "source": "/adapters/a-1", "priority": 5},
        {"name": "a-2", "targets": [{"model": "b-private"}]},
    ):
        assert (await port.ask("POST", "/v1/adapters", declared, token="secret-a")).status == 201
    full = await port.ask("POST", "/v1/adapters", {"name": "a-3"}, token="secret-a")
    assert (full.status, full.code) == (507, "store_full")
    assert port.changing.full.startswith("The names of the token a may take at most 2 places")


async def test_a_limited_token_fills_its_part_of_the_store_and_no_more(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the same names have one part, however many there are, and at whatever moment."""
    monkeypatch.setattr("extproc.adapters.tokens.MAX_DECLARATIONS", 12)
    port.token_file.write_text(f"{LIMITED}secret-a2 name=a2 allow=a-*\n")
    lists = [[{"name": f"a-{k}{n}", "load": "lazy"} for n in range(2)] for k in range(4)]
    answers = await asyncio.gather(
        *(
            port.ask("POST", "/v1/adapters", each, token=token)
            for each, token in zip(lists, ("secret-a", "secret-a2") * 2, strict=True)
        )
    )
    assert sorted(each.status for each in answers) == [200, 200, 507, 507]
    assert len(port.store.entries) == 4

    names = iter(port.store.entries)
    for body, token, status in (
        ({"name": "a-new"}, "secret-a2", 507),
        ([{"name": "b-1"}, {"name": "b-2"}, {"name": "b-3"}, {"name": "b-4"}], "secret-b", 200),
        ({"name": next(names), "load": "lazy", "rank": 8}, "secret-a", 200),
        ({"name": "a-operator"}, TOKEN, 201),
    ):
        tag = {"If-Match": "*"} if "rank" in body else {}
        answer = await port.ask("POST", "/v1/adapters", body, token=token, **tag)
        assert answer.status == status, answer.text
    for name in list(port.store.entries)[:2]:
        await port.ask("DELETE", f"/v1/adapters/{name}", token="secret-a")
        await port.store.forget(name)
    assert (
        await port.ask("POST", "/v1/adapters", {"name": "a-new"}, token="secret-a")
    ).status == 201


async def test_a_limited_tokens_part_counts_tenants_and_targets(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.adapters.tokens.MAX_DECLARATIONS", 12)
    port.token_file.write_text(LIMITED)
    alias = {"name": "a-alias", "targets": [{"model": f"a-{n}"} for n in range(ITEMS_A_PLACE)]}
    wide = alias | {"targets": [{"model": f"a-{n}"} for n in range(2 * ITEMS_A_PLACE)]}
    replaces = {"If-Match": "*"}
    for body, headers, status in (
        (alias, {}, 201),
        ({"name": "a-1", "load": "lazy"}, {}, 201),
        (wide, replaces, 200),
        ({"name": "a-2", "load": "lazy"}, {}, 507),
        (
            wide | {"targets": [{"model": f"a-{n}"} for n in range(3 * ITEMS_A_PLACE)]},
            replaces,
            507,
        ),
        (alias, replaces, 200),
        ({"name": "a-2", "load": "lazy"}, {}, 201),
    ):
        answer = await port.ask("POST", "/v1/adapters", body, token="secret-a", **headers)
        assert answer.status == status, answer.text


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
        ({}, 504, "not_ready", "they may list it later."),
        (
            {"state": "loading", "reason": "timeout", "message": "p1: 5 s"},
            504,
            "not_ready",
            "they may list it later (timeout: p1: 5 s).",
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
    monkeypatch.setattr("extproc.adapters.registrationhttp.BODY_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port.server.port)
    writer.write(
        f"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n"
        "content-length: 10\r\n\r\n{".encode()
    )
    line = await asyncio.wait_for(reader.readline(), 60)
    writer.close()

    assert line.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("name", ["a[b]c", "a?c", "a" * 200 + "!"])
async def test_nothing_in_a_pattern_but_the_star_is_special(port: Port, name: str) -> None:
    allowed = f"a[b]*,a?c,{'a*' * 50}!"
    port.token_file.write_text(f"t allow={allowed}\n")
    answers = [
        await port.ask("POST", "/v1/adapters", {"name": each}, token="t") for each in (name, "abc")
    ]

    assert [each.status for each in answers] == [201, 403]
