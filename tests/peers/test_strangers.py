"""Strangers on the gRPC port of a router that has peers: what they cannot stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from extproc.config.configfile import ConfigError
from extproc.config.warnings import unproven_peers
from extproc.gen import peers_pb2
from extproc.service.peeraccess import check_peers
from tests.builders import address
from tests.peers.peered import KEY_FILE, Peered, configured
from tests.peers.scene import message
from tests.peers.test_adapterpeers import SQL
from tests.wire.fake_call import begin


class Loader(Peered):
    """A router that loads an adapter, unless another one does it for it."""

    def __init__(self, peers: dict[str, Any]) -> None:
        super().__init__("m", peers)
        self.adapters.declare([SQL])


@pytest.mark.parametrize("key_file", [None, KEY_FILE])
@pytest.mark.parametrize("nonce", [b"", b"n" * 16])
async def test_a_stranger_who_echoes_what_is_declared_stops_no_loads_and_ends_no_picks(
    key_file: Path | None, nonce: bytes
) -> None:
    router = Loader({"static": [], "key_file": key_file})
    call, session = begin(router.peering.methods(), "Link")
    session.receive(message(hello=peers_pb2.Hello(router_id="0", nonce=nonce)))
    router.adapters.tell([], {}, loads=True, now=0.0)
    await asyncio.sleep(0)
    heard = [peers_pb2.PeerMessage.FromString(each) for each in call.sent]
    told = [each.adapters for each in heard if each.HasField("adapters")]
    assert bool(told) == (key_file is None)  # whom nothing is told has nothing to echo

    echo = peers_pb2.Adapters(
        loads=True,
        declared=told[0].declared if told else 1,
        failed=[peers_pb2.FailedAdapter(name="sql", reason="files")],
        leaving=[peers_pb2.AdapterPlace(address=address(1), name="sql")],
    )
    sums = peers_pb2.Sums(is_whole=True, names=[address(1), ""], places=[0, 1, 1, 0, 1, 1])
    for each in (
        message(adapters=echo),
        message(sums=sums),
        message(entries=peers_pb2.Entries(log_entries=[b"ends a pick"])),
    ):
        session.receive(each)

    assert not router.adapters.is_led(may_load=True, now=0.0)
    assert not router.adapters.is_led(may_load=False, now=0.0)
    assert not router.catalog.planner.leaving_elsewhere
    assert router.catalog.failed == {}
    assert not router.pool.peer_picks.num_in_flight
    assert not router.relay.is_fed


def test_a_file_of_keys_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    check_peers(configured({"static": []}))
    (tmp_path / "short").write_text("short")
    for name, why in (("missing", "No such file"), ("short", "fewer than 32 characters")):
        with pytest.raises(ConfigError, match=rf"peers\.key_file: .*{name}: .*{why}"):
            check_peers(configured({"static": [], "key_file": tmp_path / name}))


def test_at_the_start_it_is_said_where_nothing_proves_who_is_a_peer(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("cert_file", "key_file", "client_ca_file")}
    plain = {name: files[name] for name in ("cert_file", "key_file")}
    open_to_all: dict[str, Any] = {"static": [], "key_file": None}

    assert "cannot verify its peers" in next(unproven_peers(configured(open_to_all)))
    assert list(unproven_peers(configured(open_to_all, {"tls": plain})))
    assert not list(unproven_peers(configured(open_to_all, {"tls": files})))
    assert not list(unproven_peers(configured({"static": []})))
    assert not list(unproven_peers(configured(None)))
