"""Addresses, and those that may stand as an endpoint's."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.address import (
    MAX_PORT,
    Address,
    as_envoy_writes,
    check_endpoint_address,
    host_of,
    is_in_subset,
)


@given(
    st.ip_addresses().map(str) | st.sampled_from(("localhost", "pod-0.vllm", "a_b")),
    st.integers(0, MAX_PORT),
)
def test_an_address_is_read_as_it_was_written(host: str, port: int) -> None:
    address = Address(host, port)

    assert Address.parse(str(address)) == address
    assert host_of(str(address)) == host


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"
    assert Address.parse("[::1]:80") == Address("::1", 80)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:x",
        "a:65536",
        "a:\u0661",
        "::1:80",
        "[a]:1",
        "[::1]",
        "a b:1",
        "a/b:1",
    ],
)
def test_what_is_not_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        Address.parse(text)


@given(st.ip_addresses(v=4), st.integers(1, MAX_PORT))
def test_every_ipv4_address_with_a_port_is_taken_as_it_is(ip: IPv4Address, port: int) -> None:
    assert check_endpoint_address(f"{ip}:{port}") == f"{ip}:{port}"


@given(st.ip_addresses(v=6), st.integers(1, MAX_PORT))
@example(IPv6Address("::ffff:10.0.0.7"), 80)
@example(IPv6Address("::10.0.0.7"), 80)
@example(IPv6Address("::a00"), 80)
@example(IPv6Address("::1"), 80)
def test_an_ipv6_address_is_written_as_the_system_does(ip: IPv6Address, port: int) -> None:
    written = f"[{socket.inet_ntop(socket.AF_INET6, ip.packed)}]:{port}"

    for text in (ip.compressed, ip.exploded, ip.exploded.upper()):
        assert check_endpoint_address(f"[{text}]:{port:05d}") == written


@pytest.mark.parametrize(
    "address",
    ["localhost:80", "pod-0.vllm:8000", "a:1", "010.0.0.1:80", "10.0.0:80", "[::1::]:80"],
)
def test_a_name_is_refused_with_a_word_on_what_takes_names(address: str) -> None:
    with pytest.raises(ValueError, match=r"must be `ip:port`: .*; discovery\.dns does"):
        check_endpoint_address(address)


@pytest.mark.parametrize(
    ("address", "cure"),
    [
        ("10.0.0.1", "the port is missing"),
        ("10.0.0.1:0", "the port from 1"),
        ("http://10.0.0.1:80", "without `http://`"),
        ("https://pod", "for HTTPS set pods.tls"),
        ("10.0.0.1:80/v1", "without a path"),
        ("::1:80", "in brackets"),
        ("localhost:80", "this host is 127.0.0.1"),
    ],
)
def test_what_newcomers_write_is_refused_with_its_cure(address: str, cure: str) -> None:
    with pytest.raises(ValueError, match=f"must be `ip:port`.*{cure}"):
        check_endpoint_address(address)


@pytest.mark.parametrize("address", ["", "10.0.0.1:65536", "[1]:80", "[fe80::1%eth0]:80"])
def test_what_is_no_address_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be `ip:port`"):
        check_endpoint_address(address)


@given(st.text(max_size=30))
def test_whatever_is_taken_has_no_name_and_no_list_in_it(text: str) -> None:
    try:
        address = check_endpoint_address(text)
    except ValueError:
        return
    assert set(address) <= set("0123456789abcdef.:[]")


@given(st.ip_addresses(v=6), st.sampled_from([":8000", "", None]))
def test_an_ipv6_address_of_a_subset_is_compared_as_an_address(
    ip: IPv6Address, port: str | None
) -> None:
    pod = check_endpoint_address(f"[{ip}]:8000")
    for text in (ip.exploded.upper(), str(ip)):
        named = text if port is None else f"[{text}]{port}"
        assert is_in_subset(pod, frozenset({as_envoy_writes(named)}))


@pytest.mark.parametrize("text", ["1.1.1.1:1", "1.1.1.1", "a:b:c", "[::g]:80", "::g", ""])
def test_what_is_no_ipv6_address_of_a_subset_stays_as_it_is(text: str) -> None:
    assert as_envoy_writes(text) == text
