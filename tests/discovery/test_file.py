"""Endpoints from text: every entry is right, or the message says which is not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.file import make_endpoints, parse_endpoints
from extproc.types import Endpoint


def test_a_list_of_addresses_and_mappings_is_read_in_order() -> None:
    text = """
    - 10.0.0.7:8000
    - {address: "10.0.0.8:8001", name: pod-b}
    - "[2001:db8::1]:80"
    - {address: "10.0.0.9:8000", group: l4}
    """

    assert parse_endpoints(text, scheme="https") == [
        Endpoint("10.0.0.7:8000", "https://10.0.0.7:8000"),
        Endpoint("10.0.0.8:8001", "https://10.0.0.8:8001", "pod-b"),
        Endpoint("[2001:db8::1]:80", "https://[2001:db8::1]:80"),
        Endpoint("10.0.0.9:8000", "https://10.0.0.9:8000", group="l4"),
    ]


def test_an_empty_list_empties_the_pool() -> None:
    assert parse_endpoints("[]") == []


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "null", "---\n"])
def test_a_file_without_a_list_is_not_an_empty_list(text: str) -> None:
    """Writers that do not replace a file in one step make it empty first."""
    with pytest.raises(ValueError, match=r"empty; for no endpoints write \[\]"):
        parse_endpoints(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not YAML"),
        ("a: 1", "must be a list"),
        ("10.0.0.1:1", "must be a list"),
        (20 * "[" + 20 * "]", "must be `ip:port` or"),
        (500 * "[", "collections in one another"),
        ("- &a [*a]", "aliases written out"),
        ("- 2024-13-45", "month must be"),
        ("- 10.0.0.1:1\n- 5", "entry 1: must be `ip:port` or {address, name, group}, got 5"),
        ("- {address: '1.1.1.1:1', weight: 2}", "entry 0: must be"),
        ("- {name: pod}", "entry 0: address must be `ip:port`, got None"),
        ("- {address: 5}", "entry 0: address must be `ip:port`, got 5"),
        ("- {address: '1.1.1.1:1', name: 5}", "entry 0: name must be a string, got 5"),
        ("- 1.1.1.1:1\n- {address: '1.1.1.1:1'}", "entry 1: 1.1.1.1:1 is a duplicate"),
    ],
)
def test_errors_name_the_wrong_entry(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_endpoints(text)


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "10.0.0.1:",
        ":80",
        "10.0.0.1:0",
        "10.0.0.1:65536",
        "10.0.0.1:99999",
        "10.0.0.1:\uff18\uff10",  # digits, but not ASCII ones
        "http://10.0.0.1:80",
        "10.0.0.1:80/path",
        "10.0.0.1 :80",
        "2001:db8::1:80",
        "[10.0.0.1:80",
        "[fe80::1%eth0]:80",
        "fe80%eth0:80",
        "localhost:8000",
        "pod-0.vllm:8000",
        "10.0.0.1,10.0.0.2:80",
        "",
    ],
)
def test_addresses_that_envoy_cannot_dial_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="entry 0: address .*: must be `ip:port`"):
        make_endpoints([{"address": address}])


@given(st.lists(st.tuples(st.ip_addresses(v=4), st.integers(1, 65_535)), unique=True, max_size=5))
def test_every_address_and_port_is_taken_as_it_is(pairs: list[tuple[object, int]]) -> None:
    addresses = [f"{ip}:{port}" for ip, port in pairs]

    made = make_endpoints(addresses)

    assert [endpoint.address for endpoint in made] == addresses
    assert all(endpoint.is_ready for endpoint in made)


def test_two_spellings_of_one_address_are_one_pod() -> None:
    (made,) = make_endpoints(["[0:0::1]:80"])

    assert (made.address, made.url) == ("[::1]:80", "http://[::1]:80")
    with pytest.raises(ValueError, match=r"entry 1: \[::1\]:80 is a duplicate"):
        make_endpoints(["[::1]:80", "[0:0::1]:80"])
