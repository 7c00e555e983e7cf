"""Links to every replica of this router, and the ids of the routers at their addresses.

1. One link per address, kept open; when it ends it is dialled again, less often after each failure
   in a row.
2. An address that turns out to be our own is not dialled again while it stays listed.
3. The id of the router at an address is kept while the address is listed, even if the router cannot
   be reached: the list of discovery is decisive.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from random import Random
from typing import Any

from grpclib.client import Channel, Stream
from grpclib.config import Configuration
from grpclib.const import Cardinality
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from extproc.address import Address
from extproc.files.refusals import tls_failure
from extproc.reports.loops import choose_backoff_s
from extproc.reports.podhttp import describe
from extproc.wire.rpc import Call, Code, Session

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""From the first packet to the other end's hello."""
RETRY_S = 0.1
"""Rest after the end of a link; doubled with each failure in a row."""
MAX_RETRY_S = 5.0
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""Of messages that wait for the other end to read; far above what a session sends without a sign of
that, so whoever exceeds it lies. The link ends."""
MESSAGE_BYTES = 64
"""Bytes of a waiting message beside its content."""

Open = Callable[[Call, Callable[[str], None]], Session]

TRUST = "peers.ca_file"
"""The setting with the authorities of peers' certificates."""

_FAILURES = (OSError, GRPCError, ProtocolError, StreamTerminatedError)


@dataclass(eq=False)
class PeerDialler:
    """Links to the addresses that discovery lists. Belongs to one event loop.

    Attributes:
        open_session: Begins a session of the link; gets the callable for the other end's hello.
        tls: Called for each connection, so that renewed files are used; None for plain text.
        tls_name: Name in the peers' certificates; None where `tls` does not check it.
        on_change: Called when an address or the id of its router has changed.
    """

    method: str
    own_id: str
    open_session: Open
    _: KW_ONLY
    rng: Random
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    tls_name: str | None = None
    on_change: Callable[[], None] = lambda: None
    _ids: dict[str, str | None] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._config = Configuration(ssl_target_name_override=self.tls_name)

    @property
    def routers(self) -> list[str | None]:
        """The router id at each listed address, None while it is not known."""
        return list(self._ids.values())

    def warnings(self) -> list[str]:
        """Return which addresses TLS keeps from being linked and why, for people."""
        return [f"peer {address}: {why}" for address, why in self._refused.items()]

    def set_addresses(self, addresses: Iterable[str]) -> None:
        """Dial exactly these (`ip:port`) from now on. Call within the event loop."""
        wanted = set(addresses)
        for address in list(self._tasks):
            if address not in wanted:
                self._end(self._tasks.pop(address))
                del self._ids[address]
                self._refused.pop(address, None)
        for address in sorted(wanted - self._tasks.keys()):
            self._ids[address] = None
            # Not in a TaskGroup: peers come and go, and one link's end must not end the others.
            self._tasks[address] = asyncio.get_running_loop().create_task(
                self._keep(address), name=f"link to {address}"
            )
        self.on_change()

    async def aclose(self) -> None:
        """End all links. No callback is called after this."""
        self.on_change = lambda: None
        self.set_addresses(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        task.cancel()

    async def _keep(self, address: str) -> None:
        num_failures = 0
        while True:
            link = _Link(lambda router_id: self._learn(address, router_id))
            try:
                await link.run(self._channel(address), self.method, self.open_session)
                reason = "it ended the link"
            except _FAILURES as error:
                reason = describe(error, trust=TRUST)
                self._note(address, tls_failure(error, trust=TRUST))
            except Exception:
                log.exception("link to %s raised an error", address)
                reason = "error"
            if self._ids.get(address) == self.own_id:
                return
            log.log(logging.INFO if link.is_open else logging.DEBUG, "peer %s: %s", address, reason)
            num_failures = 1 if link.is_open else num_failures + 1
            rest_s = choose_backoff_s(
                num_failures, interval_s=RETRY_S, max_backoff_s=MAX_RETRY_S, rng=self.rng
            )
            await asyncio.sleep(rest_s)

    def _channel(self, address: str) -> Channel:
        parsed = Address.parse(address)
        return Channel(
            parsed.host, parsed.port, ssl=self.tls(), codec=_Bytes(), config=self._config
        )

    def _note(self, address: str, refusal: str) -> None:
        """Remember why TLS failed and say it once; other failures say nothing of that."""
        if refusal and address in self._ids and self._refused.get(address) != refusal:
            self._refused[address] = refusal
            log.warning("peer %s: %s", address, refusal)

    def _learn(self, address: str, router_id: str) -> None:
        self._refused.pop(address, None)
        log.info("peer %s is %s", address, "us" if router_id == self.own_id else router_id)
        if address in self._ids:  # else it has just left the list
            self._ids[address] = router_id
            self.on_change()


class _Link(Call):
    """One connection, from dialling to its end: the `Call` of its session.

    It holds `MAX_UNSENT_BYTES` at most.
    """

    def __init__(self, on_hello: Callable[[str], None]) -> None:
        self.is_open = False
        self._on_hello = on_hello
        self._reason = ""
        self._over = asyncio.Event()
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_bytes = 0

    async def run(self, channel: Channel, method: str, open_session: Open) -> None:
        """Dial, and run until either end closes the link.

        Raises:
            OSError, GRPCError, ProtocolError, StreamTerminatedError: It failed.
        """
        session = None
        try:
            async with (
                asyncio.timeout(HANDSHAKE_S) as limit,
                channel.request(method, Cardinality.STREAM_STREAM, bytes, bytes) as stream,
            ):
                await stream.send_request()

                def learn(router_id: str) -> None:
                    limit.reschedule(None)
                    self.is_open = True
                    self._on_hello(router_id)

                session = open_session(self, learn)
                await self._exchange(stream, session)
        finally:
            if session is not None:
                session.closed()
            channel.close()

    async def _exchange(self, stream: Stream[bytes, bytes], session: Session) -> None:
        loop = asyncio.get_running_loop()
        # The first to end ends the link; a TaskGroup would wait for the other.
        reader = loop.create_task(self._read(stream, session))
        writer = loop.create_task(self._write(stream))
        # An end does not wait for the writer: the other end may never read what it sends.
        tasks = (reader, writer, loop.create_task(self._over.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._reason:
            raise StreamTerminatedError(self._reason)
        if reader not in done:  # else `stream` itself reads the status from the other end
            await stream.cancel()

    async def _read(self, stream: Stream[bytes, bytes], session: Session) -> None:
        while (message := await stream.recv_message()) is not None:
            session.receive(message)

    def send(self, message: bytes) -> None:
        num_bytes = self._num_bytes + len(message) + MESSAGE_BYTES
        if num_bytes > MAX_UNSENT_BYTES:
            self.end(Code.RESOURCE_EXHAUSTED, "it does not read")
        else:
            self._num_bytes = num_bytes
            self._messages.put_nowait(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        self._reason = self._reason or details
        self._over.set()

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Do nothing: this transport has no budget."""

    async def _write(self, stream: Stream[bytes, bytes]) -> None:
        while True:
            message = await self._messages.get()
            await stream.send_message(message)
            self._num_bytes -= len(message) + MESSAGE_BYTES


class _Bytes(CodecBase):
    """Passes bytes through: the session encodes and decodes messages."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:
        return data
