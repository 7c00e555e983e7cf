"""A record of traffic: what its lines have and never have, and what is counted as missing."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from extproc.gen.client.extproc.v1 import Candidate, Decision, Outcome, Pick, Rejection
from extproc.observe import recording as module
from extproc.observe.recording import COLUMNS, OPEN, REFUSED, Recording, RecordNames

KEY = b"sixteen bytes at least"
BEGAN = datetime(2026, 5, 1, 12, tzinfo=UTC)
POD = Candidate(address="10.0.0.1:8000", name="pod-1", max_loras=8)


def picked(number: int, *, at_s: float = 0.0, sequence: int = 0, **fields: Any) -> Decision:
    pick = {
        "id": f"pick-{number}",
        "adapter": "sql",
        "body_bytes": 400,
        "endpoints": [POD.address],
        "policy": "founding",
        "candidates": [POD],
    }
    return Decision(
        sequence=sequence or number,
        time=BEGAN + timedelta(seconds=at_s),
        pick=Pick(**(pick | fields)),  # type: ignore[arg-type]
    )


def ended(number: int, **fields: Any) -> Decision:
    end = {
        "pick_id": f"pick-{number}",
        "outcome": "completed",
        "status": 200,
        "ttft_seconds": 0.25,
        "duration_seconds": 1.5,
        "body_bytes": 8000,
        "output_tokens": 40.2,
    }
    return Decision(time=BEGAN, outcome=Outcome(**(end | fields)))  # type: ignore[arg-type]


def text_of(recording: Recording, *messages: Decision, router: int = 0) -> str:
    return "".join(line for each in messages for line in recording.lines(router, each))


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines(), COLUMNS))


def summary(recording: Recording) -> Any:
    *_, last = recording.rest()
    return json.loads(last.removeprefix("# "))


def plain(num_routers: int = 1) -> Recording:
    return Recording(RecordNames(KEY, is_plain=True), num_routers)


def test_a_request_is_a_line_when_it_has_ended() -> None:
    recording = plain()
    assert text_of(recording, picked(1)) == ""
    decided = picked(2, at_s=3.0, held_seconds=0.5, adapter=None)
    (first, second) = rows(text_of(recording, ended(1), decided, ended(2, ttft_seconds=None)))

    assert first == {
        "arrival_s": "0.0",
        "adapter": "sql",
        "prompt_tokens": "100",
        "output_tokens": "40",
        "prompt_bytes": "400",
        "output_bytes": "8000",
        "tenant": "",
        "route": "",
        "objective": "",
        "router": "0",
        "policy": "founding",
        "pod": "pod-1",
        "held_s": "",
        "ttft_s": "0.25",
        "duration_s": "1.5",
        "outcome": "completed",
        "status": "200",
    }
    assert (second["arrival_s"], second["held_s"], second["adapter"]) == ("2.5", "0.5", "")
    assert second["ttft_s"] == ""


def test_an_end_that_comes_with_its_pick_is_a_line_at_once() -> None:
    decision = picked(1)
    decision.outcome = ended(1).outcome
    assert len(rows(text_of(plain(), decision))) == 1


def test_a_refused_request_is_a_line_without_tokens_or_a_name_in_clear() -> None:
    rejection = Rejection(status=404, reason="model_not_found", message="no m", model="my secret")
    recording = plain()
    decision = Decision(sequence=1, time=BEGAN, rejection=rejection)
    (row,) = rows(text_of(recording, decision))

    assert (row["outcome"], row["status"], row["prompt_tokens"]) == (REFUSED, "404", "")
    assert row["adapter"] == RecordNames(KEY).hashed("my secret")


SECRETS = ("prompt-mark", "tenant-mark", "route-mark", "objective-mark")
MODELS = ("adapter-mark", "pod-mark", "model-mark", "path-mark", "id-mark", "explained-mark")


@pytest.mark.parametrize("is_plain", [False, True])
def test_texts_of_requests_and_names_are_not_in_a_record(is_plain: bool) -> None:
    pod = Candidate(address="10.9.9.9:8000", name="pod-mark", max_loras=8)
    decision = picked(
        1,
        adapter="adapter-mark",
        model="model-mark",
        served_model="model-mark",
        path="/path-mark",
        request_id="id-mark",
        tenant="tenant-mark",
        route="route-mark",
        objective="objective-mark",
        endpoints=[pod.address],
        candidates=[pod],
    )
    decision.explanation = "explained-mark"
    refused = Rejection(model="prompt-mark", message="prompt-mark", why="prompt-mark", path="/p")
    recording = Recording(RecordNames(KEY, is_plain), 1)
    text = text_of(
        recording,
        decision,
        ended(1, model="model-mark", request_id="id-mark", served_by=pod.address),
        Decision(sequence=2, time=BEGAN, rejection=refused),
    )
    text += "".join(recording.rest())

    in_clear = {"adapter-mark", "pod-mark"} if is_plain else set()
    assert {each for each in (*SECRETS, *MODELS, "10.9.9.9") if each in text} == in_clear


def test_a_hash_cannot_be_had_without_the_key_and_is_the_same_with_it() -> None:
    own, other = RecordNames(KEY), RecordNames(KEY[::-1])
    assert own.hashed("sql") == RecordNames(KEY).hashed("sql") != other.hashed("sql")
    assert own.hashed("sql") != own.hashed("chat")
    assert own.hashed("") == ""
    assert own.shown("sql") == own.hashed("sql")


def test_decisions_that_did_not_come_restarts_and_lost_connections_are_counted() -> None:
    recording = plain(2)
    for number in (5, 6, 9, 2):
        text_of(recording, picked(number), ended(number))
    text_of(recording, picked(100), router=1)
    recording.broke_off(1)

    assert recording.says().endswith(
        "missing: 2 decisions, and those of 1 lost connections and 1 restarts"
    )
    assert summary(recording)["routers"] == [
        {"num_decisions_missed": 2, "num_restarts": 1, "num_lost_connections": 0},
        {"num_decisions_missed": 0, "num_restarts": 0, "num_lost_connections": 1},
    ]


def test_a_request_without_an_end_is_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN", 2)
    recording = plain()
    (first,) = rows(text_of(recording, picked(1), picked(2), picked(3)))
    *rest, _ = recording.rest()

    assert (first["outcome"], first["output_tokens"]) == (OPEN, "")
    assert [row["outcome"] for row in rows("".join(rest))] == [OPEN, OPEN]


def test_the_last_line_has_the_pods_with_their_slots() -> None:
    recording = plain()
    other = Candidate(address="10.0.0.2:8000", max_loras=4)
    text_of(recording, picked(1), picked(2, at_s=7.0, candidates=[POD, other]), ended(1), ended(2))

    assert summary(recording)["pods"] == [
        {"pod": "pod-1", "first_s": 0.0, "last_s": 7.0, "max_loras": 8},
        {"pod": "10.0.0.2:8000", "first_s": 7.0, "last_s": 7.0, "max_loras": 4},
    ]
    assert summary(recording)["num_requests"] == 2


def test_a_pod_has_its_name_where_its_request_was_told_with_other_candidates() -> None:
    recording = plain()
    end = ended(1, served_by="10.0.0.2:8000", served_by_name="pod-2")
    (row,) = rows(text_of(recording, picked(1), end))

    assert row["pod"] == "pod-2"


def test_tokens_that_no_router_told_are_by_the_bytes_of_those_that_it_told() -> None:
    recording = plain()
    for number in range(1, 100):  # 200 bytes a token
        text_of(recording, picked(number), ended(number, body_bytes=8000, output_tokens=40.0))
    guessed = text_of(recording, picked(100), ended(100, output_tokens=None))
    whole = text_of(
        recording, picked(101), ended(101, output_tokens=None, ttft_seconds=None, body_bytes=400)
    )

    assert [row["output_tokens"] for row in rows(guessed + whole)] == ["40", "100"]
    assert summary(recording)["num_guessed_tokens"] == 2
