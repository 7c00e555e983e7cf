"""Contents in Redis or Valkey, for routers on several hosts.

Nothing is fetched before its length is known: a script returns contents that are short enough, and
names those that are too long. Versions are integers of fewer than `MAX_DIGITS` digits, and no
script writes a number of its own.

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
seen. Then we write back the declarations that we know: none is lost as long as one router runs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from msgspec import Struct
from redis import exceptions
from redis.asyncio import Redis as Client
from redis.asyncio.connection import SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.credentials import CredentialProvider

from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    MAX_DECLARATIONS,
    StoreError,
    StoreFullError,
)
from extproc.adapters.stores.redisreplies import MAX_NAME_BYTES, BoundedParser
from extproc.files.refusals import tls_failure
from extproc.files.tls import client_context

TIMEOUT_S = 2.0
"""For connecting, and for each answer."""
NUM_RETRIES, RETRY_S = 2, 0.05
"""Of a question whose connection was cut, as all are when the server restarts. A script that ran
already does no harm when it runs again."""

MAX_DIGITS = 16
"""Of a version and a little more: a thousand writes a second for 30,000 years. Lua's numbers, which
are doubles, count so far without rounding. More is somebody's mistake."""
_PROBLEMS = {0: "too large", -1: "gone"}
"""The script's answers in place of a content. One is gone that was written and deleted since: the
next read has no such name.
"""

T = TypeVar("T")

# KEYS: contents, version, changes, floor, and for one more the lease.
# ARGV: longest content, longest name, most names, which: one, those since a version, or all; and of
# how many digits a version is none.
_READ = """
local names
if ARGV[4] == 'one' then
    names = {ARGV[5]}
elseif ARGV[4] == 'since' then
    names = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[5], '+inf', 'LIMIT', 0, ARGV[3])
else
    names = redis.call('HKEYS', KEYS[1])
end
local found = {}
local version = redis.call('GETRANGE', KEYS[2], 0, ARGV[6])
local floor = redis.call('GETRANGE', KEYS[4], 0, ARGV[6])
for i = 1, math.min(#names, tonumber(ARGV[3])) do
    local name, content = names[i], 0
    local length = redis.call('HSTRLEN', KEYS[1], name)
    if #name <= tonumber(ARGV[2]) and length <= tonumber(ARGV[1]) then
        content = redis.call('HGET', KEYS[1], name) or -1
    end
    found[2 * i - 1] = string.sub(name, 1, tonumber(ARGV[2]))
    found[2 * i] = content
end
return {version, floor, found}
"""
_SWAP = """
if redis.call('HSTRLEN', KEYS[1], ARGV[1]) ~= #ARGV[2] then return 0 end
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
if tonumber(redis.call('GET', KEYS[2]) or '0') >= tonumber(ARGV[1]) then return 0 end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('SET', KEYS[4], ARGV[2])
redis.call('PUBLISH', KEYS[3], ARGV[2])
return 1
"""
_LEASE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class _Credentials(CredentialProvider):
    """The user, and the password as it is when a connection is made: servers change it."""

    def __init__(self, user: str, password: Callable[[], str]) -> None:
        self._user, self._password = user, password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return user and password, or the password alone."""
        password = self._password()
        return (self._user, password) if self._user else (password,)


def _without_user(url: str) -> tuple[str, str]:
    """Return a URL without its user, whom it may name, and that user."""
    scheme, _, rest = url.partition("://")
    place, slash, path = rest.partition("/")
    user, _, host = place.rpartition("@")
    return f"{scheme}://{host}{slash}{path}", unquote(user.partition(":")[0])


def _without_protocol(url: str) -> str:
    """Return a URL without the version of the protocol, which is ours to choose."""
    place, _, query = url.partition("?")
    kept = "&".join(each for each in query.split("&") if not each.startswith("protocol="))
    return f"{place}?{kept}" if kept else place


class _TlsConnection(SSLConnection):
    """A connection with TLS as in all of ours, and what the URL's parameters ask of it.

    The library's own trusts the system's authorities besides the file, and not the same on every
    Python. The files are read anew each time that it connects.
    """

    async def connect(self) -> None:
        """Connect, unless it is connected.

        Raises:
            OSError: A file cannot be used.
        """
        if not self.is_connected:
            self._read_files()
        await super().connect()  # type: ignore[no-untyped-call]

    def _read_files(self) -> None:
        asked = self.ssl_context
        ca_file, certificate, key = (
            Path(each) if each else None for each in (asked.ca_certs, asked.certfile, asked.keyfile)
        )
        asked.context = context = client_context(
            ca_file,
            verify=asked.cert_reqs != ssl.CERT_NONE,
            checks_name=asked.check_hostname,
            certificate=certificate,
            key=key,
        )
        if asked.min_version is not None:
            context.minimum_version = asked.min_version
        if asked.ciphers is not None:
            context.set_ciphers(asked.ciphers)


class _Reading(Struct):
    version: int
    forgotten_until: int
    contents: dict[str, bytes | StoreError]


class Redis:
    """Contents on one server.

    Args:
        url: `redis://`, `rediss://` (TLS) or `unix://`, with a user and a database where needed.
        key: First part of all keys.
        password: Returns it, for each connection; None for none.
        ca_file: PEM file with the CAs of the server's certificate; None for the system's.
        interval_s: Between two questions for the version.
    """

    keeps_deleted = True

    def __init__(
        self,
        url: str,
        *,
        key: str,
        password: Callable[[], str] | None,
        ca_file: Path | None,
        interval_s: float,
    ) -> None:
        options: dict[str, Any] = {}
        if password is not None:
            url, user = _without_user(url)
            options["credential_provider"] = _Credentials(user, password)
        if ca_file is not None:
            options["ssl_ca_certs"] = str(ca_file)
        self._client = Client.from_url(
            _without_protocol(url),
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(ConstantBackoff(RETRY_S), NUM_RETRIES),
            protocol=2,
            parser_class=BoundedParser,
            **options,
        )
        pool = self._client.connection_pool
        if pool.connection_class is SSLConnection:
            pool.connection_class = _TlsConnection
        self._url = url.rpartition("@")[2]  # without user and password
        self._key = key
        self._keys = [key, f"{key}:version", f"{key}:changes", f"{key}:floor"]
        self._interval_s = interval_s
        self._fetch = self._client.register_script(_READ)
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
            why = tls_failure(error, trust="adapters.store.redis.ca_file") or error
            raise kind(f"{self._url}: {why}") from error
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
        read = await self._take_from("one", name)
        if read.version < self._version:
            await self._write_back()
            read = await self._take_from("one", name)
        content = read.contents[name]
        if isinstance(content, StoreError):
            if str(content) == _PROBLEMS[-1]:
                return None
            raise StoreError(f"{name}: {content}")
        return content

    async def _read(self) -> Mapping[str, bytes | StoreError]:
        if self._contents is None:
            return await self._read_all()
        read = await self._take_from("since", str(self._version))
        if read.version < self._version:
            await self._write_back()
            return await self._read_all()
        if read.forgotten_until > self._version:
            return await self._read_all()
        if read.version > self._version:
            self._contents = {**self._contents, **read.contents}
            self._version = read.version
        return self._contents

    async def _read_all(self) -> Mapping[str, bytes | StoreError]:
        read = await self._take_from("all", "")
        self._contents, self._version = read.contents, read.version
        return self._contents

    async def _take_from(self, which: str, argument: str) -> _Reading:
        """Return contents, and the versions of the same moment."""
        # One more than are allowed, so that the excess is noticed.
        limits = MAX_CONTENT_BYTES, MAX_NAME_BYTES, MAX_DECLARATIONS + 1
        args: list[str | int] = [*limits, which, argument, MAX_DIGITS]
        version, floor, found = await self._fetch(keys=self._keys, args=args)
        if wrong := [each for each in found if isinstance(each, exceptions.RedisError)]:
            raise wrong[0]  # in the middle of an answer: then the rest says nothing either
        contents = {
            name.decode(errors="replace"): (
                content if isinstance(content, bytes) else StoreError(_PROBLEMS[content])
            )
            for name, content in zip(found[::2], found[1::2], strict=True)
        }
        return _Reading(_integer("version", version), _integer("floor", floor), contents)

    async def _write_back(self) -> None:
        known = self._contents or {}
        pairs = [
            part
            for name, content in known.items()
            if isinstance(content, bytes)
            for part in (name, content)
        ]
        await self._restore(keys=self._keys, args=[self._version, self._version + 1, *pairs])


def _integer(key: str, digits: bytes) -> int:
    """Return a version; 0 for none.

    Raises:
        StoreError: It is none.
    """
    if not digits:
        return 0
    if not (digits.isdigit() and len(digits) < MAX_DIGITS):
        raise StoreError(f"the key :{key} must be an integer below 10^{MAX_DIGITS - 1}: {digits!r}")
    return int(digits)
