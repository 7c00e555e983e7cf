"""One request of a workload over HTTP: its body, its response as it streams in, and its record.

No I/O here, so that any client can use it. A client encodes a body with `encode_body`, feeds what
it reads to a `StreamMeter` and makes a `RequestRecord` of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from extproc.lab.workload.requests import NO_TENANTS, PLAIN, Arrival, Tenant
from extproc.lab.workload.running import FleetResult, FlightState, LabFlight, PodTotals

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_WORDS = (
    " the and for you not are all new was can has our one may out use any see his who its now get "
    "how had way two top per day set end did men war old too big low act age air arm art ask bad "
    "bed box boy bus buy car cat cup cut die dog dry"
)
"""Each with its space is four bytes, and one token of most models' tokenizers."""
_VOCABULARY = tuple(f" {word}" for word in _WORDS.split())
_HEAD_TOKENS = 16
"""A KV block of vLLM: prompts that differ in it share no cached prefix."""
_CHAT_TOKENS = 4
"""Tokens that a chat template adds to a message, as the fake pod counts them."""


class RequestRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request with its outcome. Times are seconds from the start of the replay.

    Attributes:
        index: Its place in the workload.
        adapter: None for the base model.
        at_s: When it was due.
        sent_s: Later than `at_s` if the generator lags.
        first_token_s: Arrival of its first piece; None without any.
        gaps_s: Times from each piece of the response to the next. Pieces are tokens if the server
            sends each token by itself.
        num_tokens: Tokens of the response: the server's count if it reports one, else the pieces.
        wanted_tokens: Tokens that were requested.
        status: HTTP status; 0 without a response.
        error: "" for success. Else `connect`, `reset`, `timeout` (of the whole), `abandoned` (no
            first token in time), or `http_` and the status. Within a stream `cut` (it ended early),
            `in_stream` (an error), `not_a_stream`, or `stopped` (the test was stopped meanwhile).
        code: Of the error in the body, e.g. `late` or `saturated` where the router refuses.
        served_by: The header `x-served-by` of fake pods, "" without.
    """

    index: int
    adapter: str | None
    tenant: str
    at_s: float
    sent_s: float
    ended_s: float
    first_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    num_tokens: int = 0
    wanted_tokens: int = 0
    prompt_tokens: int = 0
    status: int = 0
    error: str = ""
    code: str = ""
    served_by: str = ""

    @property
    def delay_s(self) -> float:
        """The lag of the generator."""
        return self.sent_s - self.at_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first text; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if it failed."""
        if self.error or self.first_token_s is None:
            return None
        num_tokens = self.num_tokens or self.wanted_tokens
        return (self.ended_s - self.first_token_s) / max(1, num_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The form of request bodies.

    Attributes:
        path: `COMPLETIONS` or `CHAT`.
        base_model: The model of requests without an adapter.
        extra: Further fields of every body. `{"ignore_eos": True}` makes vLLM's responses as long
            as requested; servers may refuse fields that they do not know.
    """

    path: str = COMPLETIONS
    base_model: str = "base"
    extra: tuple[tuple[str, Any], ...] = ()


def encode_body(arrival: Arrival, index: int, form: RequestForm) -> bytes:
    """Encode the JSON body of a streaming request, the workload's at place `index`."""
    body: dict[str, Any] = {
        "model": arrival.adapter or form.base_model,
        "max_tokens": max(1, arrival.output_tokens),
        "stream": True,
        "stream_options": {"include_usage": True},
        **dict(form.extra),
    }
    num_tokens = arrival.prompt_tokens - (_CHAT_TOKENS if form.path == CHAT else 0)
    num_shared = min(arrival.prefix_tokens, max(0, num_tokens - 1))  # one token is its own
    text = shared_text(arrival)[: 4 * num_shared] + prompt_text(index, num_tokens - num_shared)
    if form.path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    return msgspec.json.encode(body)


def shared_text(arrival: Arrival) -> str:
    """Return the prefix that a prompt shares with other prompts, of four bytes a token; "" for
    none.
    """
    return "".join(Random(f"prefix/{arrival.prefix}").choices(_VOCABULARY, k=arrival.prefix_tokens))


def prompt_text(index: int, num_tokens: int) -> str:
    """Return a prompt of `num_tokens` words (at least one) of four bytes each.

    The first ones are drawn by `index`, so that no two prompts begin alike.
    """
    num_words = max(0, num_tokens - 1)
    head = Random(f"request/{index}").choices(_VOCABULARY, k=_HEAD_TOKENS)
    return "".join(head[:num_words]) + _VOCABULARY[0] * (num_words - _HEAD_TOKENS) + "."


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None


class _Piece(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def is_token(self) -> bool:
        """Whether it is more than the opening or the end of a response.

        vLLM sends half a character, or a special token, as an empty text.
        """
        text = self.text if self.delta is None else self.delta.content
        is_opening = self.delta is not None and self.delta.role is not None
        return bool(text) or (text == "" and self.finish_reason is None and not is_opening)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Piece] = []
    usage: _Usage | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(_Event)


class StreamMeter:
    """Reads a stream of server-sent events and records when tokens arrived.

    Attributes:
        times_s: Arrival of each piece of the response, by the caller's clock.
        num_tokens: The server's count once it has sent one, else the pieces so far.
        error: `in_stream` or `not_a_stream`; "" without an error.
        is_done: Whether the stream has ended as it should.
    """

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.num_tokens = 0
        self.error = ""
        self.is_done = False
        self._rest = b""

    def feed(self, data: bytes, *, now: float) -> None:
        """Read data that arrived at `now`, cut anywhere."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip(), now)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Seconds between the pieces."""
        return tuple(later - earlier for earlier, later in pairwise(self.times_s))

    def _read(self, event: bytes, now: float) -> None:
        if event == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = _EVENTS.decode(event)
        except msgspec.DecodeError:
            self.error = "not_a_stream"
            return
        if chunk.error is not None:
            self.error = "in_stream"
        if any(piece.is_token for piece in chunk.choices):
            self.times_s.append(now)
            self.num_tokens += 1
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens


def error_of(status: int, meter: StreamMeter) -> str:
    """Return the error of a response read to its end, as in `RequestRecord.error`."""
    if status != 200:
        return f"http_{status}"
    return meter.error or ("" if meter.is_done else "cut")


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Failure(msgspec.Struct):
    error: _Error = msgspec.field(default_factory=_Error)


def code_of(body: bytes) -> str:
    """Return the code of the error that a response's body tells in OpenAI's form, "" for none.

    vLLM repeats the status there, which is no such code.
    """
    try:
        code = msgspec.json.decode(body, type=_Failure).error.code
    except msgspec.DecodeError:
        return ""
    return code if isinstance(code, str) else ""


def save_records(records: Iterable[RequestRecord], path: Path) -> None:
    """Write records as JSON lines.

    Raises:
        OSError: They cannot be written.
    """
    path.write_bytes(msgspec.json.Encoder().encode_lines(list(records)))


def as_fleet_result(
    records: Iterable[RequestRecord],
    *,
    overhead_s: float = 0.0,
    warm_up_s: float = 0.0,
    pods: Sequence[PodTotals] = (),
    tenants: Mapping[str, Tenant] = NO_TENANTS,
) -> FleetResult:
    """Convert a replay to the form of a run in virtual time, so that the same measures apply.

    Times count from the actual sending: the generator's lag is not the server's. Responses count
    with their real lengths: a server that ends early is not faster per token.

    Args:
        records: One per request, in any order, of any number of generators.
        overhead_s: Time that network and gateway add to a response, which virtual time leaves out;
            subtracted from the times of responses.
        warm_up_s: Requests sent before this do not count.
        pods: The pods' totals, if known; named as in `x-served-by`.
        tenants: The workload's.
    """
    ordered = sorted(records, key=lambda record: (record.sent_s, record.index))
    flights = [_flight(record, overhead_s, tenants.get(record.tenant, PLAIN)) for record in ordered]
    ended_s = max((record.ended_s for record in ordered), default=0.0)
    totals = pods or [PodTotals(p, 0, 0) for p in sorted({f.pod for f in flights if f.pod})]
    return FleetResult(flights, totals, warm_up_s, ended_s, tenants=tuple(tenants))


def _flight(record: RequestRecord, overhead_s: float, tenant: Tenant) -> LabFlight:
    sent_s, first_s, state = record.sent_s, record.first_token_s, _state(record)
    num_tokens = record.num_tokens or record.wanted_tokens
    return LabFlight(
        str(record.index),
        Arrival(sent_s, record.adapter, record.prompt_tokens, num_tokens, record.tenant),
        router=0,
        has_objectives=tenant.has_objectives,
        state=state,
        status=record.status,
        reason=record.code if state is FlightState.SHED else "",
        pod=record.served_by,
        dispatched_s=sent_s if record.served_by else None,
        first_token_s=None if first_s is None else max(sent_s, first_s - overhead_s),
        ended_s=max(sent_s, record.ended_s - overhead_s),
    )


def _state(record: RequestRecord) -> FlightState:
    if not record.error:
        return FlightState.FINISHED
    if record.error == "abandoned":
        return FlightState.ABANDONED
    is_refused = record.error.startswith("http_") and not record.served_by
    return FlightState.SHED if is_refused else FlightState.FAILED
