"""The measured abuses: none is left out, each goes to its limit, and what is read is what came."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from bench import abuse
from bench.attacks import ATTACKS, READY, Attack, Step, open_stream, split_frames
from extproc.core.budget import Budget
from extproc.core.wire import Abuse, Counters, frames, grpc
from extproc.core.wire.limits import DEFAULT_LIMITS

_ROOT = Path(__file__).parents[1]
_CHEAP = {
    Abuse.MESSAGE_TOO_LARGE,
    Abuse.HEADER_BLOCK,
    Abuse.HEADER_LIST,
    Abuse.CONTINUATION_FLOOD,
    Abuse.HANDSHAKE_TIMEOUT,
    Abuse.HALF_OPEN,
}


def _attack(name: Abuse) -> Attack:
    return next(attack for attack in ATTACKS if attack.abuse is name)


def test_every_limit_is_measured_or_needs_a_socket() -> None:
    measured = {attack.abuse for attack in ATTACKS}

    assert measured | abuse.NEEDS_SOCKET == set(Abuse)
    assert not measured & abuse.NEEDS_SOCKET


@pytest.mark.parametrize("name", sorted(_CHEAP))
def test_an_attack_ends_as_promised_and_spares_the_bystander(name: Abuse) -> None:
    row = abuse.measure(_attack(name))

    assert row.is_as_promised, row
    assert (row.limit, row.refused) == (name, 0)
    assert row.asked > 0


def test_sent_is_what_was_sent_behind_the_handshake() -> None:
    row = abuse.measure(_attack(Abuse.CONTINUATION_FLOOD))

    assert row.sent_frames == 1 + DEFAULT_LIMITS.max_continuation_frames + 1
    assert row.sent_bytes == row.sent_frames * frames.FRAME_HEADER_BYTES


def test_memory_that_a_connection_keeps_is_seen() -> None:
    """A header block of three frames; what was put together of it is held."""
    row = abuse.measure(_attack(Abuse.HEADER_BLOCK))

    assert row.peak_bytes > DEFAULT_LIMITS.max_header_block_bytes


def test_an_attack_that_does_not_come_to_its_limit_is_told() -> None:
    short = dataclasses.replace(_attack(Abuse.PING_FLOOD), make_steps=lambda: [Step(bytes(0))])
    row = abuse.measure(short)

    assert (row.ending, row.is_as_promised) == ("not ended", False)
    assert "NOT AS PROMISED" in abuse.render([row])


def test_the_bystander_notices_when_new_streams_are_refused() -> None:
    budget = Budget()
    bystander = abuse.Bystander(Counters(), budget)
    bystander.ask(0.0)
    budget.add_unsent(budget.max_bytes)
    bystander.ask(0.0)
    budget.add_unsent(-budget.max_bytes)
    bystander.ask(0.0)

    assert (bystander.asked, bystander.refused, bystander.unanswered) == (3, 1, 0)


def test_the_bystander_asks_as_long_as_it_takes() -> None:
    """The windows that its answers use are given back."""
    bystander = abuse.Bystander(Counters(), Budget())
    for _ in range(frames.DEFAULT_WINDOW_BYTES // 9 + 100):
        bystander.ask(0.0)

    assert bystander.unanswered == bystander.refused == 0


_END = frames.END_STREAM | frames.END_HEADERS
_TRAILERS = frames.frame(frames.HEADERS, _END, 1, grpc.trailer_block(8, "why"))


@pytest.mark.parametrize(
    ("output", "ending"),
    [
        (b"", "nothing"),
        (frames.ping(bytes(8)), "nothing"),
        (frames.goaway(7, 0xB, b"why"), "GOAWAY ENHANCE_YOUR_CALM"),
        (frames.goaway(frames.LARGEST_STREAM_ID, 0), "drained"),
        (frames.rst_stream(1, 7), "REFUSED_STREAM"),
        (_TRAILERS + frames.rst_stream(1, 0), "RESOURCE_EXHAUSTED"),
        (_TRAILERS + frames.goaway(1, 0), "GOAWAY NO_ERROR"),
    ],
)
def test_the_ending_is_read_from_what_was_written(output: bytes, ending: str) -> None:
    assert abuse.read_ending(output) == ending


def test_frames_are_cut_apart() -> None:
    stream = open_stream(3)

    assert list(split_frames(stream + frames.ping(bytes(8)))) == [
        (frames.HEADERS, 3, stream[frames.FRAME_HEADER_BYTES :]),
        (frames.PING, 0, bytes(8)),
    ]
    assert READY.endswith(open_stream(1, before=b"\x20"))


def test_every_row_of_the_page_says_what_it_costs() -> None:
    page = (_ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    table = page.partition("## Limits")[2].partition("## The rules")[0]
    costs = dict(re.findall(r"^\|[^|]+\| `(\w+)` \|.*\|([^|]+)\|$", table, flags=re.M))

    assert costs.keys() == set(Abuse)
    assert {name for name, cost in costs.items() if "CPU" not in cost} == abuse.NEEDS_SOCKET
