"""The service with its endpoints from DNS: the real process, a DNS server on loopback."""

from __future__ import annotations

import pytest

from extproc.config.configfile import ConfigError, parse_config
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from tests.dnsserver import DnsServer
from tests.e2e.harness import RouterProcess
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("dns", "message"),
    [
        ("{name: pods}", "type a needs a port"),
        ("{name: pods, type: srv, port: 1}", "type srv takes none"),
        ("{name: 'a b', port: 1}", "name"),
        ("{name: pods, port: 0}", "greater than or equal to 1"),
        ("{name: pods, port: 1, nameservers: [10.0.0.53]}", "nameservers"),
        ("{name: pods, port: 1, ttl: 5}", "unknown; allowed: name, type, port"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(dns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f"discovery: {{dns: {dns}}}")


async def test_pods_are_followed_by_name_and_survive_the_name_server() -> None:
    pod = await start_pod(PodConfig())
    host, port = pod.address.split(":")
    try:
        async with DnsServer() as server:
            dns = {"name": "pods", "port": int(port), "interval_s": 0.1, "timeout_s": 5}
            dns["nameservers"] = [server.address]
            server.records["pods.", "A"] = [host]
            async with RouterProcess({"discovery": {"dns": dns}}) as router:
                await eventually(lambda: _has(router, [pod.address]), within_s=60)
                server.records["pods.", "A"] = ["127.0.0.2", host]
                both = [pod.address, f"127.0.0.2:{port}"]
                await eventually(lambda: _has(router, both), within_s=60)

                server.failing = {"A", "AAAA"}
                await eventually(lambda: router.counter("extproc_dns_failures_total"), within_s=60)
                assert await _has(router, both)
                assert "SERVFAIL" in router.log
    finally:
        await pod.stop()


async def _has(router: RouterProcess, addresses: list[str]) -> bool:
    snapshot = await router.admin("/debug/snapshot")
    return sorted(each["address"] for each in snapshot["endpoints"]) == sorted(addresses)
