"""What may stand as an endpoint's address."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.address import check_endpoint_address


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_every_ip_address_with_a_port_is_taken_as_it_is(ip: object, port: int) -> None:
    address = f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}"

    assert check_endpoint_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["localhost:80", "pod-0.vllm:8000", "a:1", "010.0.0.1:80", "10.0.0:80", "[::1::]:80", "[1]:80"],
)
def test_a_name_is_refused_with_a_word_on_what_takes_names(address: str) -> None:
    with pytest.raises(ValueError, match=r"must be `ip:port`, got .*; discovery\.dns does"):
        check_endpoint_address(address)


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", "::1:80", "[fe80::1%eth0]:80"]
)
def test_what_is_no_address_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be `ip:port`, got"):
        check_endpoint_address(address)


@given(st.text(max_size=30))
def test_whatever_is_taken_has_no_name_and_no_list_in_it(text: str) -> None:
    try:
        address = check_endpoint_address(text)
    except ValueError:
        return
    assert set(address) <= set("0123456789abcdefABCDEF.:[]")
