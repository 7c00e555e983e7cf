"""A Redis server: what its death, its forgetting and a full memory do to a store."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from extproc.adapters.stores.content import ConflictError, Medium, StoreError, StoreFullError
from extproc.adapters.stores.writing import ANY_TAG
from extproc.files.reading import read_key
from extproc.stack.processes import free_port
from tests.adapters.stores.cutter import Cut, Cutter
from tests.adapters.stores.media import (
    KEY,
    Opened,
    RedisServer,
    Watched,
    declared,
    following,
    opened,
    shown,
)
from tests.pki import Pki
from tests.servers import tcp_server
from tests.waiting import eventually

pytest.importorskip("redis")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of this test alone: it dies."""
    (tmp_path / "redis").mkdir()
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def media(tmp_path: Path, server: RedisServer) -> AsyncIterator[Opened]:
    async with opened("redis", tmp_path, server) as all_of_them:
        yield all_of_them


def redis_at(url: str) -> Medium:
    from extproc.adapters.stores.redis import Redis

    return Redis(url, key=KEY, password=None, ca_file=None, interval_s=0.01)


async def fill(store: Watched) -> dict[str, str]:
    for name in "abc":
        await store.put(declared(name))
    await store.delete("c")
    return shown(store)


async def test_without_the_server_the_last_entries_stay_and_writes_fail(
    media: Opened, server: RedisServer
) -> None:
    store = await media.store()
    there = await fill(store)
    server.kill()
    await store.poll()
    for write in (store.put(declared("d")), store.delete("a"), store.lease("one")):
        with pytest.raises(StoreError, match="127.0.0.1"):
            await write
    lost = shown(store)
    server.start()
    await store.poll()

    assert lost == shown(store) == there
    assert (len(store.failures), store.num_recoveries) == (1, 1)


async def test_a_router_that_starts_without_the_server_knows_nothing_until_it_is_there(
    media: Opened, server: RedisServer
) -> None:
    await fill(await media.store())
    server.kill()
    store = await media.store()
    before = (store.is_known, list(store.seen))
    async with following(store):
        server.start()
        await eventually(lambda: store.is_known)

    assert before == (False, [])
    assert shown(store).keys() == {"a", "b", "c"}


async def test_changes_are_followed_over_a_restart(media: Opened, server: RedisServer) -> None:
    one, other = await media.store(), await media.store()
    async with following(one), following(other):
        for each in range(3):
            server.kill()
            server.start()
            await one.put(declared(f"n{each}"))
            await eventually(lambda each=each: f"n{each}" in shown(other))  # type: ignore[misc]

    assert shown(one) == shown(other)


async def test_a_server_that_lost_its_data_gets_it_back(media: Opened, server: RedisServer) -> None:
    """Whoever has more to say writes it back; the deleted stay deleted."""
    one, other = await media.store(), await media.store()
    there = await fill(one)
    await other.poll()
    server.kill(loses_data=True)
    server.start()
    await one.poll()
    await other.poll()

    assert shown(one) == shown(other) == shown(await media.store()) == there


async def test_a_write_to_a_server_that_lost_its_data_restores_it_first(
    media: Opened, server: RedisServer
) -> None:
    store = await media.store()
    await fill(store)
    server.kill(loses_data=True)
    server.start()
    with pytest.raises(ConflictError, match="already declared with other content"):
        await store.put(declared("a", "/other"))
    await store.put(declared("d"))

    assert shown(await media.store()).keys() == {"a", "b", "c", "d"}


async def test_a_full_memory_refuses_writes_and_keeps_what_is_there(
    media: Opened, server: RedisServer
) -> None:
    store = await media.store()
    there = await fill(store)
    server.kill()
    server.start("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with pytest.raises(StoreFullError):
        await store.put(declared("d"))
    server.kill()
    server.start()
    await store.poll()

    assert shown(store) == there


async def test_a_lease_ends_by_the_servers_clock(media: Opened) -> None:
    one, other = await media.store(), await media.store()
    await one.lease("one", ttl_s=0.2)
    first = await other.lease("other", ttl_s=0.2)
    async with asyncio.timeout(60):
        while not await other.lease("other", ttl_s=60):
            await asyncio.sleep(0.05)

    assert not first
    assert not await one.lease("one", ttl_s=0.2)


async def test_a_server_with_a_password_is_used_with_it_and_its_error_does_not_show_it(
    tmp_path: Path, server: RedisServer
) -> None:
    server.kill()
    server.start("--requirepass", "secret")
    async with opened("redis", tmp_path, server) as media:
        told = []
        for password in ("secret", "wrong-one", ""):
            store = await media.store(with_password(server.url, password))
            told.append((store.is_known, store.failures))

    assert [is_known for is_known, _ in told] == [True, False, False]
    assert "wrong-one" not in str(told)


def with_password(url: str, password: str | Callable[[], str]) -> Medium:
    from extproc.adapters.stores.redis import Redis

    say = (lambda: password) if isinstance(password, str) else password
    return Redis(url, key=KEY, password=say if password else None, ca_file=None, interval_s=0.01)


@pytest.mark.parametrize("user", ["", "router"])
async def test_a_password_that_changes_is_read_for_the_next_connection(
    tmp_path: Path, server: RedisServer, user: str
) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")

    def options() -> list[str]:
        password = file.read_text().strip()
        if not user:
            return ["--requirepass", password]
        return [
            "--user",
            user,
            "on",
            f">{password}",
            "~*",
            "&*",
            "+@all",
            "--user",
            "default",
            "off",
        ]

    server.kill()
    server.start(*options())
    async with opened("redis", tmp_path, server) as media:
        url = server.url.replace("//", f"//{user}@") if user else server.url
        store = await media.store(with_password(url, lambda: read_key(file)))
        await store.put(declared("a"))
        file.write_text("new\n")
        await store.put(declared("b"))  # on the connection that there is
        server.kill()
        server.start(*options())
        await store.put(declared("c"))
        server.kill()
        file.unlink()
        server.start("--requirepass", "unknown")
        with pytest.raises(StoreError, match="password"):
            await store.put(declared("d"))

    assert shown(store).keys() == {"a", "b", "c"}


@asynccontextmanager
async def behind_tls(port: int, chain: Path, key: Path, at: int = 0) -> AsyncIterator[int]:
    """The port of a server that ends TLS, with that certificate, before another server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    writers: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, back))
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", at, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for each in writers:
            each.close()


async def test_an_authority_that_changes_is_read_for_the_next_connection(
    tmp_path: Path, media: Opened, server: RedisServer
) -> None:
    from extproc.adapters.stores.redis import Redis

    authorities = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        authorities.append(Pki(tmp_path / name))
    old, new = (each.issue("redis", "127.0.0.1") for each in authorities)
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(authorities[0].ca.read_bytes())
    async with behind_tls(server.port, *old) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        medium = Redis(url, key=KEY, password=None, ca_file=ca_file, interval_s=0.01)
        store = await media.store(medium)
        async with following(store):
            await store.put(declared("a"))
    async with behind_tls(server.port, *new, at=port):
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED|certificate"):
            await store.put(declared("b"))
        ca_file.write_bytes(authorities[1].ca.read_bytes())
        async with following(store):
            await store.put(declared("b"))
            await (await media.store()).put(declared("c"))
            await eventually(lambda: "c" in store.entries)

    assert shown(store).keys() == {"a", "b", "c"}


@pytest.mark.parametrize("cut", [Cut.CLOSED, Cut.SILENT, Cut.ERROR])
async def test_half_an_answer_is_none(
    media: Opened, server: RedisServer, cut: Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at a start, where nothing is known then, nor later, where all stays as it was."""
    if cut is not Cut.CLOSED:  # after an error the client waits for the rest
        monkeypatch.setattr("extproc.adapters.stores.redis.TIMEOUT_S", 0.5)
    there = await fill(await media.store())
    async with Cutter(server.port, b'"name":"b"') as cutter:
        cutter.cut = cut
        url = f"redis://127.0.0.1:{cutter.port}/0"
        store = await media.store(redis_at(url))
        assert (store.is_known, store.is_complete, store.seen) == (False, False, [])
        assert store.failure

        cutter.cut = Cut.NOT
        await store.poll()
        assert (store.is_complete, shown(store), store.failure) == (True, there, "")

        cutter.cut = cut
        other = await media.store()
        await other.put(declared("b", "/adapters/b-2"), if_match=ANY_TAG)
        await store.poll()
        assert (store.is_complete, shown(store)) == (True, there)
        assert store.failure
        assert cutter.num_cut >= 2


async def test_garbage_in_the_keys_is_a_failure(media: Opened) -> None:
    store = await media.store()
    there = await fill(store)
    client = store._medium._client  # type: ignore[attr-defined]
    await client.set(f"{KEY}:version", "many")
    await store.poll()
    lost = shown(store)
    await client.set(f"{KEY}:version", "99")
    await store.poll()

    assert lost == shown(store) == there
    assert len(store.failures) == 1


@pytest.mark.parametrize("key", ["version", "floor"])
@pytest.mark.parametrize("wrong", ["many", "9" * 30, "1e+30", "-1", "1.5", "1" * 999])
async def test_a_version_that_is_none_costs_nothing_once_it_is_put_right(
    media: Opened, key: str, wrong: str
) -> None:
    store = await media.store()
    there = await fill(store)
    client = store._medium._client  # type: ignore[attr-defined]
    right = await client.get(f"{KEY}:{key}") or "0"
    await client.set(f"{KEY}:{key}", wrong)
    await store.poll()
    with pytest.raises(StoreError, match=f"the key :{key} must be an integer"):
        await store.put(declared("d"))
    lost = shown(store)
    for again in (right, "2"):  # the second one as if the server had lost its data
        await client.set(f"{KEY}:{key}", again)
        await store.poll()
        await store.put(declared(f"d{int(again)}"))
        assert shown(store) == shown(await media.store())

    assert lost == there
    assert (len(store.failures), store.num_recoveries) == (1, 1)
    assert store.failures[0].count("9") < 30
    assert (await client.get(f"{KEY}:version")).isdigit()


async def test_what_is_too_long_is_never_fetched_and_costs_its_own_entry_alone(
    media: Opened, server: RedisServer
) -> None:
    """A value, a name, and the value of a known name; 4 MB each."""
    store = await media.store()
    there = await fill(store)
    client = store._medium._client  # type: ignore[attr-defined]
    huge = b"x" * 2**22
    await client.config_resetstat()
    sent_before = (await client.info("stats"))["total_net_output_bytes"]
    for name, content in ((b"a", huge), (b"huge", huge), (huge, b"x")):
        await client.hset(KEY, name, content)
        await client.zadd(f"{KEY}:changes", {name: await client.incr(f"{KEY}:version")})
    await store.poll()
    other = await media.store()
    with pytest.raises(StoreError, match="a: too large"):
        await store.put(declared("a", "/other"))
    sent_bytes = (await client.info("stats"))["total_net_output_bytes"] - sent_before

    assert shown(store) == there
    assert shown(other) == {name: source for name, source in there.items() if name != "a"}
    assert store.problems.keys() == {"a", "huge", "x" * 256}
    assert store.problems["a"] == "a: too large"
    assert sent_bytes < 100_000

    await client.hset(KEY, "a", b'{"name": "a", "source": "/right"}')
    await client.hdel(KEY, "huge", huge)
    await client.set(f"{KEY}:floor", await client.incr(f"{KEY}:version"))
    await store.poll()
    assert shown(store)["a"] == "/right"
    assert (dict(store.problems), store.num_recoveries) == ({}, 1)


async def test_following_ends_when_it_is_cancelled_whenever_that_is(media: Opened) -> None:
    store = await media.store()
    for each in range(60):
        running = asyncio.ensure_future(store.run())
        await asyncio.sleep(0.0005 * each)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=10)

        assert done


async def test_over_tls_the_authority_of_the_file_is_trusted_alone(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would trust the system's authorities as well."""
    from extproc.adapters.stores.redis import Redis

    (tmp_path / "other").mkdir()
    pki, other = Pki(tmp_path), Pki(tmp_path / "other")
    certificate, key = map(str, pki.issue("redis", "127.0.0.1"))
    port = str(free_port())
    server.kill()
    server.start(
        *("--tls-port", port, "--tls-ca-cert-file", str(pki.ca), "--tls-auth-clients", "no"),
        *("--tls-cert-file", certificate, "--tls-key-file", key),
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(pki.ca))  # what the system trusts
    for ca_file, is_trusted in ((pki.ca, True), (None, True), (other.ca, False)):
        url = f"rediss://127.0.0.1:{port}/0"
        store = Redis(url, key=KEY, password=None, ca_file=ca_file, interval_s=0.01)
        if is_trusted:
            assert await store.read() == {}
        else:
            with pytest.raises(StoreError, match="certificate refused: .*redis.ca_file"):
                await store.read()
        await store.aclose()


OK = b"+OK\r\n"


@pytest.mark.parametrize(
    ("begin", "rest", "why"),
    [
        (b"$99999999999\r\n", b"x" * 65536, "text"),
        (b"+", b"x" * 65536, "limit"),
        (b"*2000000000\r\n", b":1\r\n" * 4096, "values"),
        (b"*3\r\n$1\r\n1\r\n$1\r\n1\r\n*2000000000\r\n", b"*0\r\n" * 4096, "values"),
        (b"", b"*1\r\n" * 4096, "nested"),
        (b"$-9\r\n", b"", "text"),
        (b">2\r\n+a\r\n+b\r\n", b">2\r\n+a\r\n+b\r\n" * 4096, "Protocol"),
    ],
    ids=["text", "line", "list", "contents", "nesting", "negative", "pushes"],
)
async def test_a_server_that_sends_what_has_no_end_is_an_error_and_no_memory(
    begin: bytes, rest: bytes, why: str
) -> None:
    from extproc.adapters.stores.redis import Redis

    num_sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while b"EVALSHA" not in (asked := await reader.read(65536)):
                if not asked:
                    return
                writer.write(OK * asked.count(b"*"))
            writer.write(begin)
            while rest:
                writer.write(rest)
                num_sent += len(rest)
                await writer.drain()
            await reader.read()
        writer.close()

    async with tcp_server(serve) as address:
        url = f"redis://{address}/0?protocol=3&socket_keepalive=yes"
        medium = Redis(url, key=KEY, password=None, ca_file=None, interval_s=0.01)
        with pytest.raises(StoreError, match=why):
            await medium.read()
        await medium.aclose()

    assert num_sent < 64 * 1024 * 1024
