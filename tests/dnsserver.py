"""A DNS server on loopback, UDP and TCP on one port, with the records of a test."""

from __future__ import annotations

import asyncio
import struct
from typing import Self, cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """Answers from `records`; an unknown name is NXDOMAIN, an unknown type of it an empty answer.

    Attributes:
        records: By absolute name and type, as in a zone file: `{("pods.", "A"): ["10.0.0.1"]}`.
        additional: By absolute name and type; sent along with every answer.
        failing: Types, or `NAME TYPE`, that get SERVFAIL.
        is_silent: Whether it leaves every question unanswered.
        max_udp_bytes: Longer answers are for TCP.
        num_to_lose: How many of the next questions are lost.
        questions: `NAME TYPE` of each question, and `tcp` where it came so, in order.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.records: dict[tuple[str, str], list[str]] = {}
        self.additional: dict[tuple[str, str], list[str]] = {}
        self.failing: set[str] = set()
        self.is_silent = False
        self.num_to_lose = 0
        self.ttl_s = 600
        self.max_udp_bytes = 512  # RFC 1035, 4.2.1
        self.questions: list[str] = []
        self.address = ""
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._tcp = await asyncio.start_server(self._serve_tcp, self.host, port)
        port = self._tcp.sockets[0].getsockname()[1]
        loop = asyncio.get_running_loop()
        self._udp, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self), (self.host, port)
        )
        self.address = f"{self.host}:{port}"

    async def stop(self) -> None:
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()
            await self._tcp.wait_closed()

    def answer(self, wire: bytes, *, is_tcp: bool) -> bytes | None:
        """Return the answer to one message; None for none."""
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name, kind = question.name.to_text(), question.rdtype.name
        self.questions.append(f"{name} {kind}" + (" tcp" if is_tcp else ""))
        if self.is_silent:
            return None
        if self.num_to_lose:
            self.num_to_lose -= 1
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if self.failing & {kind, f"{name} {kind}"}:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif found := self.records.get((name, kind)):
            response.answer.append(self._rrset(name, kind, found))
            for (other, other_kind), texts in self.additional.items():
                response.additional.append(self._rrset(other, other_kind, texts))
        encoded = response.to_wire()
        if len(encoded) > self.max_udp_bytes and not is_tcp:
            response.answer.clear()
            response.additional.clear()
            response.flags |= dns.flags.TC
            encoded = response.to_wire()
        return encoded

    def _rrset(self, name: str, kind: str, texts: list[str]) -> dns.rrset.RRset:
        return dns.rrset.from_text(name, self.ttl_s, "IN", kind, *texts)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            answer = self.answer(await reader.readexactly(length), is_tcp=True)
            if answer is not None:
                writer.write(struct.pack("!H", len(answer)) + answer)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an `isinstance`: asyncio's own is no DatagramTransport in Python 3.11.
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, is_tcp=False)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)
