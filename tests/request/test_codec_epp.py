"""The additions of the endpoint picker protocol, read by a second implementation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.request import messages as m
from extproc.request.codec import Codec
from extproc.request.controlheaders import CONTROL_HEADERS
from extproc.types import Hints, Pick
from tests.builders import address, pick, request
from tests.request import ext_proc
from tests.request.ext_proc import destination, phase, read

CODEC = Codec()
ENDPOINTS = (address(1), address(2), address(3), address(4))
SUBSET = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [address(1)]}}
COMMANDS = [m.ContinueHeaders, m.ContinueBody]


def removed(answer: bytes) -> list[str]:
    """Names of the headers that the answer removes."""
    names: list[str] = getattr(read(answer), phase(answer)).response.header_mutation.remove_headers
    return names


def metadata(answer: bytes) -> dict[str, Any]:
    """The response's metadata about the pick, other than the destination."""
    found: dict[str, Any] = read(answer).dynamic_metadata.to_dict()["extproc.pick"]
    return found


# --- control headers -------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ext_proc.SPELLINGS)
def test_every_control_header_is_taken(spelling: ext_proc.Spelling) -> None:
    headers = dict.fromkeys(CONTROL_HEADERS, "1")
    event = CODEC.decode(ext_proc.request_headers(headers=headers, spelling=spelling))

    assert isinstance(event, m.RequestHeaders)
    assert event.headers.items() >= headers.items()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_control_headers_that_came_are_removed_and_no_others(command: Any) -> None:
    hints = Hints("o", header_names=("x-llm-d-inference-objective", "x-slo-ttft-ms"))
    asked = pick("id-7", info=request(hints=hints))

    with_hints, without = CODEC.encode(command(asked)), CODEC.encode(command(pick("id-7")))

    assert removed(with_hints) == ["x-llm-d-inference-objective", "x-slo-ttft-ms"]
    assert removed(without) == []
    assert destination(with_hints) == destination(without) == (address(1), address(1), "id-7")


# --- subsets and who served ------------------------------------------------------------------


@pytest.mark.parametrize("honours", [True, False])
@pytest.mark.parametrize(
    "message",
    [ext_proc.request_headers(metadata=SUBSET), ext_proc.request_body(b"x", metadata=SUBSET)],
    ids=["headers", "body"],
)
def test_a_subset_hint_is_read_unless_it_is_switched_off(message: bytes, honours: bool) -> None:
    event = Codec(honours_subset=honours).decode(message)

    assert isinstance(event, m.RequestHeaders | m.BodyChunk)
    assert event.subset == ({address(1)} if honours else None)


@pytest.mark.parametrize("metadata", [None, {}, {"envoy.lb": {"other": "x"}}])
def test_a_body_without_a_subset_hint_has_none(
    metadata: dict[str, dict[str, Any]] | None,
) -> None:
    assert CODEC.decode(ext_proc.request_body(b"x", metadata=metadata)) == m.BodyChunk(b"x", True)


def test_without_protocol_config_no_body_mode_is_known_in_either_direction() -> None:
    asked = CODEC.decode(ext_proc.request_headers(body_mode=None))
    answered = CODEC.decode(ext_proc.response_headers({":status": "200"}))

    assert isinstance(asked, m.RequestHeaders)
    assert isinstance(answered, m.ResponseHeaders)
    assert (asked.body_mode, asked.response_body_mode, answered.body_mode) == (None, None, None)


# --- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_scores_fall_from_one_in_even_steps_by_rank(command: Any) -> None:
    codec = Codec(tells_scores=True)
    answer = codec.encode(command(pick("id-7", endpoints=ENDPOINTS)))

    scores = metadata(answer)["x-gateway-destination-endpoint-scores"]
    assert scores == dict(zip(ENDPOINTS, [1.0, 0.75, 0.5, 0.25], strict=True))
    assert destination(answer) == (",".join(ENDPOINTS), ",".join(ENDPOINTS), "id-7")


@given(
    numbers=st.lists(st.integers(1, 200), min_size=1, max_size=17, unique=True),
    pick_id=st.text("0123456789abcdef-", min_size=2, max_size=130),
)
def test_scores_and_ids_do_not_get_into_each_other_s_way(numbers: list[int], pick_id: str) -> None:
    """The id is put in later: no byte of a score may look like its place."""
    endpoints = tuple(map(address, numbers))
    answer = Codec(tells_scores=True).encode(m.ContinueBody(pick(pick_id, endpoints=endpoints)))

    size = len(endpoints)
    scores = metadata(answer)["x-gateway-destination-endpoint-scores"]
    assert scores == {each: (size - place) / size for place, each in enumerate(endpoints)}
    assert destination(answer) == (",".join(endpoints), ",".join(endpoints), pick_id)


def test_scores_are_set_only_if_configured() -> None:
    answer = CODEC.encode(m.ContinueBody(pick(endpoints=ENDPOINTS)))

    assert metadata(answer).keys() == {"id"}


# --- alternates ------------------------------------------------------------------------------


@given(
    numbers=st.lists(st.integers(1, 200), min_size=1, max_size=3, unique=True),
    pick_id=st.text("0123456789abcdef-", min_size=2, max_size=130),
    tells_scores=st.booleans(),
)
def test_alternates_are_set_next_to_the_destination_and_change_nothing_else(
    numbers: list[int], pick_id: str, tells_scores: bool
) -> None:
    first, *others = map(address, numbers)
    codec = Codec(tells_scores=tells_scores)
    # Another before it: what is kept of that one must not show.
    earlier = Pick("9" * len(pick_id), request(), (first,), "rule", "r", alternates=tuple(others))
    codec.encode(m.ContinueBody(earlier))
    alone = pick(pick_id, endpoints=(first,))
    asked = Pick(
        pick_id, alone.request, (first,), alone.policy, alone.reason, alternates=tuple(others)
    )
    answer, without = codec.encode(m.ContinueBody(asked)), codec.encode(m.ContinueBody(alone))

    assert destination(answer) == (first, first, pick_id)
    told = read(answer).dynamic_metadata.to_dict()
    expected = {"extproc.alternates": dict(zip(("first", "second"), others, strict=False))}
    before = read(without).dynamic_metadata.to_dict()
    assert told == {**before, **(expected if others else {})}
    assert read(answer).request_body == read(without).request_body
