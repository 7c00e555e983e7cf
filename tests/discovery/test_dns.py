"""DNS discovery against a real server on loopback that fails in the ways DNS servers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import dns.resolver
import pytest
import pytest_asyncio
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.discovery.dns import DnsDiscovery
from extproc.discovery.dnsanswers import MAX_LABELS
from extproc.types import Endpoint
from tests.dnsserver import DnsServer
from tests.waiting import eventually


class Seen:
    """A discovery and what it said, with a clock that a test turns."""

    def __init__(self, server: DnsServer, name: str = "pods", **options: Any) -> None:
        self.now = 1000.0
        self.taken: list[list[Endpoint]] = []
        self.failures: list[str] = []
        self.num_recoveries = 0
        given = {"port": 8000, "nameservers": [server.address], "timeout_s": 5.0, **options}
        self.discovery = DnsDiscovery(
            name,
            on_endpoints=self._take,
            on_failure=self.failures.append,
            on_recovery=self._recover,
            clock=lambda: self.now,
            **given,
        )

    def _recover(self) -> None:
        self.num_recoveries += 1

    def _take(self, endpoints: Sequence[Endpoint]) -> None:
        self.taken.append(list(endpoints))

    async def look(self, times: int = 1) -> list[str] | None:
        """Look, and give the addresses in force; None where there are none yet."""
        for _ in range(times):
            await self.discovery.resolve()
        return [each.address for each in self.taken[-1]] if self.taken else None


@pytest_asyncio.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with DnsServer() as running:
        yield running


# --- A and AAAA --------------------------------------------------------------------------------


async def test_every_a_record_is_an_endpoint_sorted_by_number_and_once(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.10", "10.0.0.9", "10.0.0.9"]
    seen = Seen(server, scheme="https")

    await seen.look()

    assert seen.taken == [
        [
            Endpoint("10.0.0.9:8000", "https://10.0.0.9:8000"),
            Endpoint("10.0.0.10:8000", "https://10.0.0.10:8000"),
        ]
    ]


async def test_ipv6_addresses_stand_in_brackets(server: DnsServer) -> None:
    server.records["pods.", "AAAA"] = ["2001:db8::1"]

    assert await Seen(server).look() == ["[2001:db8::1]:8000"]


@pytest.mark.parametrize(
    ("family", "addresses"),
    [
        ("auto", ["10.0.0.1:8000"]),
        ("ipv4", ["10.0.0.1:8000"]),
        ("ipv6", ["[2001:db8::1]:8000"]),
        ("both", ["10.0.0.1:8000", "[2001:db8::1]:8000"]),
    ],
)
async def test_a_dual_stack_pod_is_one_endpoint_unless_configured_otherwise(
    server: DnsServer, family: str, addresses: list[str]
) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    server.records["pods.", "AAAA"] = ["2001:db8::1"]

    assert await Seen(server, family=family).look() == addresses


async def test_an_alias_is_followed(server: DnsServer) -> None:
    """A server that answers a CNAME sends the addresses of its target along."""
    server.records["pods.", "A"] = ["10.0.0.1"]
    plain = server._rrset

    def aliased(name: str, kind: str, texts: list[str]) -> Any:
        return plain("else.", kind, texts)

    server._rrset = aliased  # type: ignore[method-assign]
    original = server.answer

    def answer(wire: bytes, *, is_tcp: bool) -> bytes | None:
        message = dns.message.from_wire(original(wire, is_tcp=is_tcp) or b"")
        message.answer.insert(0, dns.rrset.from_text("pods.", 5, "IN", "CNAME", "else."))
        return message.to_wire()

    server.answer = answer  # type: ignore[method-assign]

    assert await Seen(server).look() == ["10.0.0.1:8000"]


async def test_a_response_too_long_for_a_datagram_is_requested_over_tcp(server: DnsServer) -> None:
    server.records["pods.", "A"] = [f"10.0.{index}.1" for index in range(200)]

    assert len(await Seen(server).look() or ()) == 200
    assert server.questions == ["pods. A", "pods. A tcp"]


@pytest.mark.parametrize("nobody", ["0.0.0.0", "224.0.0.1"])
async def test_an_unusable_address_is_left_out_and_reported(server: DnsServer, nobody: str) -> None:
    server.records["pods.", "A"] = [nobody, "10.0.0.1"]
    seen = Seen(server)

    assert await seen.look() == ["10.0.0.1:8000"]
    assert seen.failures == [f"{nobody} is not the address of a pod"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.sets(st.ip_addresses(v=4, network="10.0.0.0/28"), min_size=1)))
async def test_the_endpoints_are_always_those_of_the_last_response(
    server: DnsServer, rounds: list[set[Any]]
) -> None:
    seen = Seen(server)
    for addresses in rounds:
        server.records["pods.", "A"] = [str(each) for each in addresses]
        assert await seen.look() == [f"{each}:8000" for each in sorted(addresses)]
    assert all(one != other for one, other in zip(seen.taken, seen.taken[1:], strict=False))
    assert seen.failures == []


# --- failure -----------------------------------------------------------------------------------


async def test_an_unchanged_result_is_reported_once(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1", "10.0.0.2"]
    seen = Seen(server)
    await seen.look()
    server.records["pods.", "A"].reverse()
    await seen.look()

    assert len(seen.taken) == 1


async def test_before_the_first_response_there_are_no_endpoints(server: DnsServer) -> None:
    """An empty pool would be a lie, and readiness would follow it."""
    server.failing = {"A", "AAAA"}
    seen = Seen(server)

    assert await seen.look(times=2) is None
    assert len(seen.failures) == 1
    assert "SERVFAIL" in seen.failures[0]


@pytest.mark.parametrize("trouble", ["SERVFAIL", "silence", "gone", "nonsense"])
async def test_a_failing_server_loses_no_endpoint_and_is_reported_once(trouble: str) -> None:
    async with DnsServer() as server:
        server.records["pods.", "A"] = ["10.0.0.1"]
        seen = Seen(server, timeout_s=0.3, empty_after_s=0)
        while await seen.look() is None:  # a loaded machine may be slower than the timeout
            pass
        seen.failures.clear()
        match trouble:
            case "SERVFAIL":
                server.failing = {"A", "AAAA"}
            case "silence":
                server.is_silent = True
            case "nonsense":
                server.answer = lambda wire, *, is_tcp: wire[:5]  # type: ignore[method-assign]
            case "gone":
                await server.stop()
        for _ in range(3):
            seen.now += 3600
            await seen.look()

        assert [len(each) for each in seen.taken] == [1]
        # The kind of trouble may change on the way, from no answer to a refusal; not each time.
        assert 1 <= len(seen.failures) <= 2
        assert seen.discovery.num_failures >= 3


async def test_an_outage_ends_with_the_next_response_and_the_next_outage_is_reported_again(
    server: DnsServer,
) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server)
    await seen.look()
    server.failing = {"A", "AAAA"}
    await seen.look()
    assert seen.num_recoveries == 0
    server.failing, server.records["pods.", "A"] = set(), ["10.0.0.2"]
    assert await seen.look(times=2) == ["10.0.0.2:8000"]
    assert seen.num_recoveries == 1
    server.failing = {"A", "AAAA"}
    await seen.look()

    assert len(seen.failures) == 2
    assert seen.failures[0] == seen.failures[1]


async def test_a_lost_datagram_is_repeated_within_one_look(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    server.num_to_lose = 1

    assert await Seen(server, timeout_s=3.0).look() == ["10.0.0.1:8000"]


async def test_who_stops_waits_for_the_question_under_way(server: DnsServer) -> None:
    """Cut off at the wrong moment it would leave a socket that uvloop waits for, for ever."""
    server.records["pods.", "A"] = ["10.0.0.1"]
    server.num_to_lose = 1
    looking = asyncio.ensure_future(Seen(server, timeout_s=3.0).look())

    await eventually(lambda: bool(server.questions))
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking

    assert server.questions == ["pods. A", "pods. A"]


async def test_one_kind_that_fails_keeps_its_own_addresses(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    server.records["pods.", "AAAA"] = ["2001:db8::1"]
    seen = Seen(server, family="both")
    await seen.look()
    server.failing = {"AAAA"}
    server.records["pods.", "A"] = ["10.0.0.2"]

    assert await seen.look() == ["10.0.0.2:8000", "[2001:db8::1]:8000"]


async def test_ipv4_that_fails_does_not_turn_the_pool_to_ipv6(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    server.records["pods.", "AAAA"] = ["2001:db8::1"]
    seen = Seen(server)
    await seen.look()
    server.failing = {"A"}

    assert await seen.look() == ["10.0.0.1:8000"]


async def test_a_failing_server_and_an_empty_one_are_not_nothing(server: DnsServer) -> None:
    """Unknown endpoints must not be reported as an empty pool."""
    server.records["pods.", "TXT"] = ['"there, without addresses"']
    server.failing = {"A"}

    assert await Seen(server).look() is None


async def test_a_callback_that_raises_does_not_end_the_search(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    told: list[str] = []

    def refuse(endpoints: Sequence[Endpoint]) -> None:
        raise RuntimeError("not today")

    discovery = DnsDiscovery(
        "pods",
        port=1,
        on_endpoints=refuse,
        on_failure=told.append,
        clock=lambda: 0.0,
        nameservers=[server.address],
    )
    await discovery.resolve()

    assert told == ["pods: not today"]


# --- nothing there -----------------------------------------------------------------------------


async def test_an_empty_first_result_counts_at_once(server: DnsServer) -> None:
    assert await Seen(server).look() == []


@pytest.mark.parametrize("emptiness", ["no such name", "no addresses"])
async def test_nothing_there_is_believed_after_a_while_only(
    server: DnsServer, emptiness: str
) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server, empty_after_s=30)
    await seen.look()
    server.records.clear()
    if emptiness == "no addresses":
        server.records["pods.", "TXT"] = ['"still there"']

    kept = await seen.look()
    seen.now += 29.9
    kept_still = await seen.look()
    seen.now += 0.1
    gone = await seen.look()

    assert (kept, kept_still, gone) == (["10.0.0.1:8000"], ["10.0.0.1:8000"], [])
    assert seen.failures == ["pods: no addresses; the last 1 are kept for 30 s"]


async def test_a_name_that_flaps_never_empties_the_pool(server: DnsServer) -> None:
    seen = Seen(server, empty_after_s=30)
    for index in range(10):
        server.records = {("pods.", "A"): [f"10.0.0.{1 + index % 2}"]} if index % 2 == 0 else {}
        seen.now += 20
        await seen.look()

    assert all(seen.taken)


async def test_an_outage_is_not_counted_as_emptiness(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server, empty_after_s=30)
    await seen.look()
    server.failing = {"A", "AAAA"}
    seen.now += 1000
    await seen.look()
    server.failing = set()
    server.records.clear()

    assert await seen.look() == ["10.0.0.1:8000"]


async def test_pods_that_return_are_taken_at_once(server: DnsServer) -> None:
    seen = Seen(server, empty_after_s=0)
    await seen.look()
    server.records["pods.", "A"] = ["10.0.0.1"]

    assert await seen.look() == ["10.0.0.1:8000"]
    server.records.clear()
    assert await seen.look() == []


# --- SRV ---------------------------------------------------------------------------------------

SRV = "_http._tcp.vllm."


async def test_srv_records_say_host_and_port_and_the_host_is_the_name(server: DnsServer) -> None:
    server.records[SRV, "SRV"] = ["0 50 8001 vllm-1.vllm.", "9 50 8000 vllm-0.vllm."]
    server.records["vllm-0.vllm.", "A"] = ["10.0.0.5"]
    server.records["vllm-1.vllm.", "A"] = ["10.0.0.4"]
    seen = Seen(server, SRV, port=None)

    await seen.look()

    assert seen.taken == [
        [
            Endpoint("10.0.0.4:8001", "http://10.0.0.4:8001", "vllm-1"),
            Endpoint("10.0.0.5:8000", "http://10.0.0.5:8000", "vllm-0"),
        ]
    ]


async def test_one_host_may_serve_on_several_ports(server: DnsServer) -> None:
    server.records[SRV, "SRV"] = ["0 1 8001 a.", "0 1 8000 a.", "0 2 8000 a."]
    server.records["a.", "A"] = ["10.0.0.1"]

    assert await Seen(server, SRV, port=None).look() == ["10.0.0.1:8000", "10.0.0.1:8001"]


async def test_addresses_in_the_additional_section_are_not_looked_up(server: DnsServer) -> None:
    server.records[SRV, "SRV"] = ["0 1 8000 a.", "0 1 8000 b."]
    server.additional = {("a.", "A"): ["10.0.0.1"], ("b.", "A"): ["10.0.0.2"]}

    assert await Seen(server, SRV, port=None).look() == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert server.questions == [f"{SRV} SRV"]


async def test_a_target_that_fails_keeps_its_address_and_a_new_one_waits(
    server: DnsServer,
) -> None:
    server.records[SRV, "SRV"] = ["0 1 8000 a."]
    server.records["a.", "A"] = ["10.0.0.1"]
    seen = Seen(server, SRV, port=None)
    await seen.look()
    server.records[SRV, "SRV"] = ["0 1 8000 a.", "0 1 8000 b.", "0 1 8000 c."]
    server.records["c.", "A"] = ["10.0.0.3"]
    server.failing = {"a. A", "b. A"}

    assert await seen.look() == ["10.0.0.1:8000", "10.0.0.3:8000"]
    server.records[SRV, "SRV"] = ["0 1 8000 c."]
    assert await seen.look() == ["10.0.0.3:8000"]


async def test_targets_without_any_response_change_nothing(server: DnsServer) -> None:
    server.records[SRV, "SRV"] = ["0 1 8000 a."]
    server.failing = {"A", "AAAA"}

    assert await Seen(server, SRV, port=None).look() is None


@pytest.mark.parametrize("records", [["0 0 0 ."], ["0 0 0 a."], []])
async def test_an_srv_record_of_an_absent_service_is_empty(
    server: DnsServer, records: list[str]
) -> None:
    server.records[SRV, "SRV"] = records

    assert await Seen(server, SRV, port=None).look() == []


async def test_ipv6_targets_are_found_where_there_is_no_ipv4(server: DnsServer) -> None:
    server.records[SRV, "SRV"] = ["0 1 8000 a."]
    server.records["a.", "AAAA"] = ["2001:db8::1"]

    assert await Seen(server, SRV, port=None).look() == ["[2001:db8::1]:8000"]


# --- the system's configuration ----------------------------------------------------------------


async def test_the_search_list_of_resolv_conf_is_used(
    server: DnsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a Kubernetes pod: `pods` is `pods.NAMESPACE.svc.cluster.local`."""
    server.records["pods.b.local.", "A"] = ["10.0.0.1"]
    resolv_conf = tmp_path / "resolv.conf"
    resolv_conf.write_text("search a.local b.local\nnameserver 127.0.0.1\noptions ndots:5\n")
    read = dns.resolver.BaseResolver.read_resolv_conf

    def read_ours(self: dns.resolver.BaseResolver, _: str) -> None:
        read(self, str(resolv_conf))
        self.port = int(server.address.rpartition(":")[2])

    monkeypatch.setattr(dns.resolver.BaseResolver, "read_resolv_conf", read_ours)

    assert await Seen(server, nameservers=()).look() == ["10.0.0.1:8000"]
    assert server.questions == ["pods.a.local. A", "pods.b.local. A"]


async def test_a_missing_resolv_conf_is_reported_and_looked_for_again(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("cannot open it")

    monkeypatch.setattr(dns.resolver.BaseResolver, "read_resolv_conf", refuse)
    seen = Seen(server, nameservers=())

    assert await seen.look(times=2) is None
    assert seen.failures == ["pods: cannot open it"]


def test_it_runs_on_uvloop_and_follows_changes_until_cancelled() -> None:
    async def follow() -> None:
        async with DnsServer() as server:
            server.records["pods.", "A"] = ["10.0.0.1"]
            seen = Seen(server, interval_s=0.01)
            task = asyncio.ensure_future(seen.discovery.run())

            async def has_taken(number: int) -> bool:
                return len(seen.taken) == number

            await eventually(lambda: has_taken(1), within_s=60)
            server.records["pods.", "A"].append("10.0.0.2")
            await eventually(lambda: has_taken(2), within_s=60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    uvloop.run(follow())


# --- limits ------------------------------------------------------------------------------------


async def test_an_answer_that_takes_long_to_parse_is_refused_and_the_endpoints_stay(
    server: DnsServer,
) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server, timeout_s=60.0)
    await seen.look()
    server.records["pods.", "A"] = ["10.0.0.2"]
    long_name = ".".join(["a"] * 120) + "."
    server.additional = {(f"{number}.{long_name}", "A"): ["10.0.0.1"] for number in range(280)}

    assert await seen.look() == ["10.0.0.1:8000"]
    (failure,) = seen.failures
    assert f"more than {MAX_LABELS} labels" in failure


async def test_a_datagram_that_should_have_come_by_tcp_is_refused(server: DnsServer) -> None:
    server.records["pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server, timeout_s=60.0)
    await seen.look()
    server.records["pods.", "A"] = [f"10.0.1.{number}" for number in range(250)]
    server.max_udp_bytes = 65535
    await seen.look()
    assert len(seen.taken[-1]) == 250
    server.records["pods.", "A"] += [f"10.0.2.{number}" for number in range(250)]

    assert len(await seen.look() or []) == 250
    (failure,) = seen.failures
    assert "datagrams" in failure


async def test_records_beyond_the_most_that_are_read_change_nothing(
    server: DnsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.discovery.dns.MAX_RECORDS", 64)
    server.records["_http.pods.", "SRV"] = ["0 0 8000 a.pods."]
    server.records["a.pods.", "A"] = ["10.0.0.1"]
    seen = Seen(server, "_http.pods.", port=None)
    await seen.look()
    num_targets, num_each = 5, 16
    server.records["_http.pods.", "SRV"] = [f"0 0 80 t{n}.pods." for n in range(num_targets)]
    for number in range(num_targets):
        server.records[f"t{number}.pods.", "A"] = [
            f"10.{number}.0.{each}" for each in range(num_each)
        ]

    assert await seen.look() == ["10.0.0.1:8000"]
    assert seen.failures == ["_http.pods.: more than 64 records"]
