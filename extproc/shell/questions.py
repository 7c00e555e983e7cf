"""Questions to the router that leads, and what it answers, as messages of `extproc.v1.Peers`."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from math import inf

from extproc.core.beginnings import MARKS_BYTES
from extproc.core.bounds import (
    MAX_PATH_CHARS,
    MAX_REQUEST_ID_CHARS,
    plain,
    whole,
)
from extproc.core.following import Answer, Question, Withdrawal
from extproc.core.pickids import number_of, pick_id_of
from extproc.core.types import Hints, RequestInfo
from extproc.shell.gen import peers_pb2

MAX_TEXT_CHARS = 1024
"""Of a model's name, and of each other text of a question; who has a longer one decides alone."""
MAX_SUBSET = 1024
"""Addresses that a question names; likewise."""
MAX_ADDRESS_CHARS = 64
"""Of each; longer ones, which are no pod's, are not read."""
_MAX_MS = 2**32 - 1

Mail = Question | Answer | Withdrawal


def encode(mail: Mail, *, now: float) -> bytes | None:
    """Return the message; None for a question that is beyond a bound."""
    message = peers_pb2.PeerMessage()
    if isinstance(mail, Question):
        if not _fits(mail.request):
            return None
        _fill(message.question, mail, now)
    elif isinstance(mail, Answer):
        message.answer.number = number_of(mail.pick_id)
        if mail.address:
            message.answer.address = mail.address
        elif mail.held_s:
            message.answer.held_ms = whole(mail.held_s * 1e3, _MAX_MS)
    else:
        message.withdrawal.number = number_of(mail.pick_id)
    return message.SerializeToString()


def decode(
    router_id: str, own_id: str, message: peers_pb2.PeerMessage, *, now: float
) -> Mail | None:
    """Return what a router asks, answers or withdraws; None for anything else.

    Args:
        router_id: The other router, whose picks questions are about.
        own_id: This router, whose picks answers are about.
    """
    kind = message.WhichOneof("content")
    if kind == "question":
        return _question(router_id, message.question, now)
    if kind == "answer":
        answer = message.answer
        pick_id = pick_id_of(own_id, answer.number)
        return Answer(pick_id, answer.address, answer.held_ms / 1e3)
    if kind == "withdrawal":
        return Withdrawal(pick_id_of(router_id, message.withdrawal.number))
    return None


def _fits(request: RequestInfo) -> bool:
    hints = request.hints
    texts = (
        *(request.model, request.written, request.path, request.session or "", request.request_id),
        *(hints.objective, hints.fairness_id),
    )
    fits = all(plain(each, MAX_TEXT_CHARS) == each for each in texts)
    return fits and len(request.subset or ()) <= MAX_SUBSET


def _fill(message: peers_pb2.Question, question: Question, now: float) -> None:
    request = question.request
    message.number = number_of(question.pick_id)
    message.model, message.written = request.model, request.written
    message.path = request.path
    message.body_bytes, message.request_id = request.body_bytes, request.request_id
    message.age_ms = whole((now - request.arrived_at_s) * 1e3, _MAX_MS)
    message.hold_ms = whole((question.give_up_s - now) * 1e3, _MAX_MS)
    message.session = request.session or ""
    hints = request.hints
    message.objective, message.fairness_id = hints.objective, hints.fairness_id
    if hints.slo_ttft_ms is not None:
        message.slo_ttft_ms = hints.slo_ttft_ms
    if hints.slo_tpot_ms is not None:
        message.slo_tpot_ms = hints.slo_tpot_ms
    message.prefix_hashes.extend(request.prefix_hashes)
    if request.subset is not None:
        message.subset.addresses.extend(request.subset)
        message.subset.SetInParent()


def _question(router_id: str, message: peers_pb2.Question, now: float) -> Question:
    """Return a question; what is beyond a bound is cut, as only the asker's own bears it."""
    hints = Hints(
        message.objective[:MAX_TEXT_CHARS],
        message.fairness_id[:MAX_TEXT_CHARS],
        _positive(message.slo_ttft_ms),
        _positive(message.slo_tpot_ms),
    )
    addresses = islice(message.subset.addresses, MAX_SUBSET)
    num_hashes = bisect_right(MARKS_BYTES, message.body_bytes)
    request = RequestInfo(
        model=message.model[:MAX_TEXT_CHARS],
        path=message.path[:MAX_PATH_CHARS],
        body_bytes=message.body_bytes,
        request_id=message.request_id[:MAX_REQUEST_ID_CHARS],
        session=message.session[:MAX_TEXT_CHARS] or None,
        subset=frozenset(each for each in addresses if len(each) <= MAX_ADDRESS_CHARS)
        if message.HasField("subset")
        else None,
        arrived_at_s=now - message.age_ms / 1e3,
        hints=hints,
        prefix_hashes=tuple(islice(message.prefix_hashes, num_hashes)),
        written=message.written[:MAX_TEXT_CHARS],
    )
    return Question(pick_id_of(router_id, message.number), request, now + message.hold_ms / 1e3)


def _positive(milliseconds: float) -> float | None:
    """Return a time that may be wanted; None for 0, which stands for none, and for nonsense."""
    return milliseconds if 0 < milliseconds < inf else None
