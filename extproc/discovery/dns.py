"""Endpoints by DNS: A and AAAA records with a fixed port, or SRV records.

For docker-compose, headless Services, Consul and the like. Repeated lookups must survive the usual
behaviour of DNS servers:

1. No response (timeout, SERVFAIL, REFUSED, no network) changes nothing. Each question keeps its
   last result, so a server that fails for AAAA alone, or for one target of an SRV record, loses
   nothing.
2. "There is no such name" and "it has no addresses" are responses. But servers also send them while
   they start, reload or lose sight of a cluster, and for headless Services without a ready pod.
   They empty the pool only after a while. To keep pods that are gone costs little: they give no
   load reports and are avoided. An empty first result counts at once; there is nothing to lose.
3. The TTL is ignored. Docker's own server sends 600 s for containers that live for one; the
   interval sets how old the pool may be, and caches on the way follow rules of their own.
4. A dual-stack pod has an A and an AAAA record, and must not be counted as two pods.

dnspython implements the protocol: search lists and `ndots` of resolv.conf, retries, TCP for large
responses. `getaddrinfo` blocks a thread, distinguishes "no such name" from "no response" on some
systems only, and has no SRV. dnspython does not read /etc/hosts.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeVar

import dns.asyncresolver
import dns.exception
import dns.message
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from extproc.address import Address
from extproc.discovery.dnsanswers import CheckedBackend
from extproc.types import Endpoint

_A, _AAAA, _SRV = dns.rdatatype.A, dns.rdatatype.AAAA, dns.rdatatype.SRV
_TRIES = 3
"""Datagrams may be lost: the timeout of a question is split over so many."""
_MAX_AT_ONCE = 32
"""Concurrent questions: each has a socket."""
MAX_RECORDS = 8192
"""Addresses and targets in all answers of one look-up: eight times as many as a pool takes."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Question = tuple[str, dns.rdatatype.RdataType]
_Target = tuple[str, int]
_T = TypeVar("_T")


@dataclass(eq=False)
class DnsDiscovery:
    """Looks a name up at an interval.

    Attributes:
        name: Looked up by the system's search list, or as it is with `nameservers`.
        port: Of every address; None looks up SRV records, which have a port each.
        on_endpoints: Called with all endpoints, sorted by address, at the first result and after
            each change. An SRV record's endpoint is named by the first label of its target.
        on_failure: Called with a message, once per new failure.
        on_recovery: Called when a lookup succeeds after failures.
        clock: Monotonic seconds.
        family: `auto`: IPv4, or IPv6 where there is no IPv4; `both`: every address is an endpoint.
        timeout_s: Seconds for the response to a question, retries included.
        empty_after_s: Seconds of empty results before they are believed.
        nameservers: `ip:port` of the servers to ask; empty for those of /etc/resolv.conf.
        num_failures: Lookups with a question without a usable response.
    """

    name: str
    _: KW_ONLY
    port: int | None
    on_endpoints: Callable[[Sequence[Endpoint]], None]
    on_failure: Callable[[str], None]
    on_recovery: Callable[[], None] = lambda: None
    clock: Callable[[], float]
    family: Literal["auto", "ipv4", "ipv6", "both"] = "auto"
    interval_s: float = 5.0
    timeout_s: float = 3.0
    empty_after_s: float = 30.0
    nameservers: Sequence[str] = ()
    scheme: str = "http"
    _answers: dict[_Question, tuple[str, ...]] = field(default_factory=dict)
    _endpoints: list[Endpoint] | None = None
    _empty_since_s: float | None = None
    _failure: str = ""
    num_failures: int = 0

    async def run(self) -> None:
        """Look the name up until cancelled."""
        while True:
            await self.resolve()
            await asyncio.sleep(self.interval_s)

    async def resolve(self) -> None:
        """Look the name up once."""
        try:
            failure = await self._update()
        except Exception as error:  # e.g. a missing resolv.conf
            failure = f"{self.name}: {error}"
        self.num_failures += failure != ""
        if failure and failure != self._failure:
            self.on_failure(failure)
        if self._failure and not failure:
            self.on_recovery()
        self._failure = failure

    async def _update(self) -> str:
        """Look up, and report changes; return the first failure, "" for none."""
        lookup = _Lookup(self._resolver(), self.timeout_s, self._answers)
        endpoints = await self._find(lookup)
        if lookup.is_full:
            return f"{self.name}: more than {MAX_RECORDS} records"
        self._answers = lookup.answers
        failures = lookup.failures
        if endpoints is not None:
            failures += self._report(endpoints)
        return failures[0] if failures else ""

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Return a new resolver, because resolv.conf may have changed."""
        resolver = dns.asyncresolver.Resolver(configure=not self.nameservers)
        if self.nameservers:
            resolver.domain = dns.name.root
            addresses = map(Address.parse, self.nameservers)
            resolver.nameservers = [
                dns.nameserver.Do53Nameserver(each.host, each.port) for each in addresses
            ]
        resolver.timeout = self.timeout_s / _TRIES
        return resolver

    async def _find(self, lookup: _Lookup) -> list[Endpoint] | None:
        """Return the endpoints; None if there was no response yet."""
        if self.port is not None:
            targets: list[_Target] | None = [(self.name, self.port)]
        else:
            targets = await lookup.targets(self.name)
        if not targets:
            return None if targets is None else []
        found = await self._resolve(lookup, targets)
        if found is None:
            return None
        by_address: dict[tuple[int, _Address, int], str] = {}
        for address, (host, port) in found:
            by_address.setdefault((address.version, address, port), host)
        return [self._endpoint(key[1], key[2], by_address[key]) for key in sorted(by_address)]

    async def _resolve(
        self, lookup: _Lookup, targets: list[_Target]
    ) -> list[tuple[_Address, _Target]] | None:
        if self.family == "auto":
            found = await lookup.addresses(targets, [_A])
            others = None if found else await lookup.addresses(targets, [_AAAA])
            return others or found
        kinds = {"ipv4": [_A], "ipv6": [_AAAA], "both": [_A, _AAAA]}[self.family]
        return await lookup.addresses(targets, kinds)

    def _endpoint(self, ip: _Address, port: int, host: str) -> Endpoint:
        address = str(Address(str(ip), port))
        name = host.partition(".")[0] if self.port is None else ""
        return Endpoint(address, f"{self.scheme}://{address}", name)

    def _report(self, endpoints: list[Endpoint]) -> list[str]:
        """Report changed endpoints; return the failure, if any."""
        if endpoints or not self._endpoints:
            self._empty_since_s = None
        else:
            now = self.clock()
            if self._empty_since_s is None:
                self._empty_since_s = now
            if now - self._empty_since_s < self.empty_after_s:
                kept = f"the last {len(self._endpoints)} are kept for {self.empty_after_s:g} s"
                return [f"{self.name}: no addresses; {kept}"]
        if endpoints != self._endpoints:
            self._endpoints = endpoints
            self.on_endpoints(tuple(endpoints))
        return []


@dataclass(eq=False)
class _Lookup:
    """One round of questions; each falls back on its result of the previous round."""

    resolver: dns.asyncresolver.Resolver
    timeout_s: float
    last: dict[_Question, tuple[str, ...]]
    failures: list[str] = field(default_factory=list)
    answers: dict[_Question, tuple[str, ...]] = field(default_factory=dict)
    _enclosed: dict[_Question, tuple[str, ...]] = field(default_factory=dict)
    _num_records: int = 0

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._backend: Any = CheckedBackend()

    @property
    def is_full(self) -> bool:
        """There are more records than are read: the rest is not asked for."""
        return self._num_records > MAX_RECORDS

    async def targets(self, name: str) -> list[_Target] | None:
        """Return hosts and ports of an SRV record; priorities and weights are ignored."""
        records = await self._ask(name, _SRV)
        if records is None:
            return None
        # "." means that the domain does not offer the service.
        parts = [record.split() for record in records]
        return [(host, int(port)) for _, _, port, host in parts if host != "." and int(port)]

    async def addresses(
        self, targets: list[_Target], kinds: list[dns.rdatatype.RdataType]
    ) -> list[tuple[_Address, _Target]] | None:
        """Return the addresses of the targets; None if there are none and a question failed."""
        questions = [(target, kind) for target in targets for kind in kinds]
        texts = await asyncio.gather(*(self._ask(target[0], kind) for target, kind in questions))
        found = [
            (address, target)
            for (target, _), each in zip(questions, texts, strict=True)
            for address in self._usable(each or ())
        ]
        return found if found or None not in texts else None

    def _usable(self, texts: Iterable[str]) -> Iterable[_Address]:
        for text in texts:
            address = ipaddress.ip_address(text)
            if address.is_unspecified or address.is_multicast:
                # 0.0.0.0 is how filtering servers refuse; dialled, it is this machine itself.
                self.failures.append(f"{text} is not the address of a pod")
            else:
                yield address

    async def _ask(self, name: str, kind: dns.rdatatype.RdataType) -> tuple[str, ...] | None:
        question = (name, kind)
        answer = self._enclosed.get(question)
        if answer is None:
            answer = await self._answer(question)
        if answer is None:
            answer = self.last.get(question)
        if answer is not None:
            self.answers[question] = answer
            self._num_records += len(answer)
        return answer

    async def _answer(self, question: _Question) -> tuple[str, ...] | None:
        name, kind = question
        what = f"{name} {kind.name}"
        try:
            async with self._slots:
                if self.is_full:
                    return None
                answer = await _finish(
                    self.resolver.resolve(
                        name,
                        kind,
                        lifetime=self.timeout_s,
                        raise_on_no_answer=False,
                        search=True,
                        backend=self._backend,
                    )
                )
        except dns.resolver.NXDOMAIN:
            return ()
        except dns.resolver.LifetimeTimeout:  # its own message contains the measured seconds
            self.failures.append(f"{what}: no response within {self.timeout_s:g} s")
            return None
        except (dns.exception.DNSException, OSError) as error:
            self.failures.append(f"{what}: {error}")
            return None
        if kind == _SRV:
            self._keep_additional(answer.response)
        return tuple(record.to_text() for record in answer.rrset or ())

    def _keep_additional(self, response: dns.message.Message) -> None:
        """Keep the addresses of targets that were sent along with an SRV record."""
        for rrset in response.additional:
            if rrset.rdtype in (_A, _AAAA):
                texts = tuple(record.to_text() for record in rrset)
                self._enclosed[rrset.name.to_text(), rrset.rdtype] = texts


async def _finish(question: Coroutine[Any, Any, _T]) -> _T:
    """Wait for the response, even if cancelled: at most its lifetime.

    uvloop 0.23 can leak a socket whose creation was cancelled, and then never closes its loop.
    """
    task = asyncio.ensure_future(question)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
