"""Contents in Redis or Valkey, for routers on several hosts.

| key | what is in it |
|---|---|
| `KEY` | hash: adapter's name to content |
| `KEY:version` | number of writes |
| `KEY:changes` | sorted set: adapter's name to the version of its last write |
| `KEY:floor` | version up to which forgotten adapters are not in `KEY:changes` any more |
| `KEY:lease` | holder of the lease, while it lasts |

Each write is a script, so it is atomic, and publishes on the channel `KEY:changes`. Messages may be
lost; the version is asked for at an interval, too.

A server that was started without its data, or with older data, has a version below what we have
seen. Then we write back what we know: a declaration is not lost as long as one router lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis as Client
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from extproc.shell.stores.content import MAX_CONTENT_BYTES, MAX_DECLARATIONS
from extproc.shell.stores.medium import StoreError, StoreFullError

TIMEOUT_S = 2.0
"""For connecting, and for each answer."""
NUM_RETRIES, RETRY_S = 2, 0.05
"""Of a question whose connection was cut, as all are when the server restarts. A script that ran
already does no harm when it runs again."""

T = TypeVar("T")

# KEYS: contents, version, changes, floor, and for one more the lease.
_SWAP = """
local there = redis.call('HGET', KEYS[1], ARGV[1])
if (there or '') ~= ARGV[2] then return 0 end
if ARGV[3] ~= '' and not there and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then
    return -1
end
local version = redis.call('INCR', KEYS[2])
if ARGV[3] == '' then
    redis.call('HDEL', KEYS[1], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
    redis.call('SET', KEYS[4], version)
else
    redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
    redis.call('ZADD', KEYS[3], version, ARGV[1])
end
redis.call('PUBLISH', KEYS[3], version)
return 1
"""
_RESTORE = """
local known = tonumber(ARGV[1])
if tonumber(redis.call('GET', KEYS[2]) or '0') >= known then return 0 end
for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[2], known + 1)
redis.call('SET', KEYS[4], known + 1)
redis.call('PUBLISH', KEYS[3], known + 1)
return 1
"""
_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class Redis:
    """Contents on one server.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with a user and a database where needed.
        key: First part of all keys.
        password: "" for none.
        ca_file: PEM file with the CAs of the server's certificate; None for the system's.
        interval_s: Between two questions for the version.
    """

    def __init__(
        self, url: str, *, key: str, password: str, ca_file: Path | None, interval_s: float
    ) -> None:
        options: dict[str, Any] = {"password": password} if password else {}
        if ca_file is not None:
            options["ssl_ca_certs"] = str(ca_file)
        self._client = Client.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(ConstantBackoff(RETRY_S), NUM_RETRIES),
            **options,
        )
        self._url = url.rpartition("@")[2]  # without user and password
        self._key = key
        self._keys = [key, f"{key}:version", f"{key}:changes", f"{key}:floor"]
        self._interval_s = interval_s
        self._swap = self._client.register_script(_SWAP)
        self._restore = self._client.register_script(_RESTORE)
        self._take = self._client.register_script(_LEASE)
        self._give_back = self._client.register_script(_RELEASE)
        self._pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._version = 0
        self._contents: dict[str, bytes | StoreError] | None = None

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return all contents by name; see `Medium`."""
        return await self._ask(self._read())

    async def get(self, name: str) -> bytes | None:
        """Return the content about one adapter; see `Medium`."""
        return await self._ask(self._get(name))

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a content if it is `old`; see `Medium`."""
        args: list[bytes | str | int] = [name, old or b"", new or b"", MAX_DECLARATIONS]
        done = await self._ask(self._swap(keys=self._keys, args=args))
        if done == -1:
            raise StoreFullError(f"{self._url}: {MAX_DECLARATIONS} declarations are there")
        return bool(done)

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Take or renew the lease; see `Medium`."""
        args: list[str | int] = [holder, int(ttl_s * 1000)]
        return bool(await self._ask(self._take(keys=[f"{self._key}:lease"], args=args)))

    async def release(self, holder: str) -> None:
        """Give the lease up; see `Medium`."""
        await self._ask(self._give_back(keys=[f"{self._key}:lease"], args=[holder]))

    async def changed(self) -> None:
        """Wait for a message, at most for the interval."""
        try:
            await self._ask(self._message())
        except StoreError:
            await asyncio.sleep(self._interval_s)  # the next read says what is wrong

    async def aclose(self) -> None:
        """Close the connections."""
        with suppress(exceptions.RedisError, OSError):
            await self._pubsub.aclose()  # type: ignore[no-untyped-call]
            await self._client.aclose()

    async def _ask(self, question: Awaitable[T]) -> T:
        """Wait for the server's answer.

        Raises:
            StoreError: There is none, or it is an error, or somebody else wrote into our keys.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        try:
            return await question
        except (exceptions.RedisError, OSError, ValueError) as error:
            is_full = isinstance(error, exceptions.OutOfMemoryError)
            kind = StoreFullError if is_full else StoreError
            raise kind(f"{self._url}: {error}") from error
        finally:
            # The library waits with `wait_for`, which before Python 3.12 forgets that its task was
            # cancelled where an answer comes at the same moment.
            if task.cancelling() > num_cancelled:
                raise asyncio.CancelledError

    async def _message(self) -> None:
        if not self._pubsub.subscribed:
            await self._pubsub.subscribe(self._keys[2])
        if await self._pubsub.get_message(timeout=self._interval_s) is None:
            return
        while await self._pubsub.get_message(timeout=0) is not None:
            pass  # one read answers all that are there

    async def _get(self, name: str) -> bytes | None:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._keys[1])
            pipe.hget(self._key, name)
            version, content = await pipe.execute()
        if int(version or 0) < self._version:
            await self._write_back()
            content = await self._client.hget(self._key, name)
        found: bytes | None = content
        return found

    async def _read(self) -> Mapping[str, bytes | StoreError]:
        if self._contents is None:
            return await self._read_all()
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._keys[1])
            pipe.get(self._keys[3])
            pipe.zrangebyscore(self._keys[2], f"({self._version}", "+inf")
            version, floor, names = await pipe.execute()
        if int(version or 0) < self._version:
            await self._write_back()
            return await self._read_all()
        if int(floor or 0) > self._version:
            return await self._read_all()
        if int(version or 0) > self._version:
            found = await self._client.hmget(self._key, names) if names else []
            fresh = dict(zip(map(_text, names), map(_bounded, found), strict=True))
            self._contents = {**self._contents, **fresh}
            self._version = int(version)
        return self._contents

    async def _read_all(self) -> Mapping[str, bytes | StoreError]:
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.get(self._keys[1])
            pipe.hgetall(self._key)
            version, contents = await pipe.execute()
        self._contents = {_text(name): _bounded(content) for name, content in contents.items()}
        self._version = int(version or 0)
        return self._contents

    async def _write_back(self) -> None:
        known = self._contents or {}
        pairs = [
            part
            for name, content in known.items()
            if isinstance(content, bytes)
            for part in (name, content)
        ]
        await self._restore(keys=self._keys, args=[self._version, *pairs])


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _bounded(content: Any) -> bytes | StoreError:
    if content is None:
        return StoreError("gone")  # since its name was read: the next read has no such name
    if isinstance(content, exceptions.RedisError):
        raise content  # in the middle of an answer: then the rest says nothing either
    found: bytes = content
    return found if len(found) <= MAX_CONTENT_BYTES else StoreError("too large")
