"""The table of requests: one row, one clause of the endpoint picker protocol.

Four pods: N has the adapter `only-N`, all have `shared`; the last one drains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.kubernetes.replay import MAX_CHUNK_BYTES, Asks, Spelling
from tests.request import ext_proc

READY = (0, 1, 2)
DRAINING = 3
NOBODY = "192.0.2.77:8000"


@dataclass(frozen=True)
class Row:
    """One clause.

    Attributes:
        name: The clause in words.
        asks: The request.
        pods: The pods that it may go to; none where it is refused.
        error: Status and code of the refusal.
    """

    name: str
    asks: Asks
    pods: tuple[int, ...] = ()
    error: tuple[int, str] = (0, "")


def long_body(model: str, num_bytes: int, *, at_end: bool = False) -> bytes:
    """JSON of about so many bytes, with the model before or behind them."""
    fields = [("model", model), ("prompt", "ab" * (num_bytes // 2))]
    return json.dumps(dict(reversed(fields) if at_end else fields)).encode()


def pieces(data: bytes, num_bytes: int) -> tuple[bytes, ...]:
    return tuple(data[at : at + num_bytes] for at in range(0, len(data), num_bytes))


SPLIT_NAME = (b'{"model": "on', b'ly-1", "prompt": "hi', b'"}')
EMPTY_LAST = (b'{"model": "only-1", "prompt": "hi"}', b"")

LONG = pieces(long_body("only-0", 400_000), 65_536)
TO_THE_BYTE = long_body("only-0", MAX_CHUNK_BYTES - 33)
MODEL_LAST = pieces(long_body("only-2", 150_000, at_end=True), 20_000)

SELECTION = [
    *[Row(f"the-model-of-the-body-decides-the-pod-{n}", Asks(f"only-{n}"), (n,)) for n in READY],
    Row("every-ready-pod-is-eligible-without-a-hint", Asks("shared"), READY),
    Row("a-model-that-is-split-over-chunks-is-found", Asks(chunks=SPLIT_NAME), (1,)),
    Row("an-empty-chunk-may-end-the-body", Asks(chunks=EMPTY_LAST), (1,)),
    Row("trailers-may-end-the-body", Asks("only-2", has_trailers=True), (2,)),
    Row("trailers-may-follow-a-split-body", Asks(chunks=SPLIT_NAME, has_trailers=True), (1,)),
    Row("a-body-above-a-message-is-echoed-in-chunks", Asks(chunks=LONG), (0,)),
    Row("a-large-message-is-echoed-in-chunks", Asks(chunks=(b"".join(LONG[:3]),) + LONG[3:]), (0,)),
    Row("a-body-of-one-chunk-to-the-byte", Asks(chunks=(TO_THE_BYTE,)), (0,)),
    Row("the-model-may-come-last", Asks(chunks=MODEL_LAST), (2,)),
    Row("a-data-plane-may-leave-its-modes-out", Asks("only-1", mode=None), (1,)),
    Row("a-body-may-come-buffered", Asks("only-1", mode=ext_proc.BUFFERED), (1,)),
    Row("completions-are-routed-as-chats-are", Asks("only-1", path="/v1/completions"), (1,)),
]

NO_ENDPOINTS = (503, "no_endpoints")
LATE_HINT = Asks("shared", subset=(NOBODY,), subset_is_late=True)
SUBSETS = [
    Row("the-hint-of-one-is-kept", Asks("shared", subset=(1,)), (1,)),
    Row("the-hint-of-two-is-kept", Asks("shared", subset=(0, 2)), (0, 2)),
    Row("the-hint-may-be-text", Asks("shared", subset=(0, 2), subset_as_text=True), (0, 2)),
    Row("addresses-in-no-pool-are-ignored", Asks("shared", subset=(NOBODY, 2)), (2,)),
    Row("a-hint-of-an-ip-has-all-its-ports", Asks("shared", subset=("127.0.0.3",)), (1,)),
    Row("a-hint-that-comes-with-the-body-holds", LATE_HINT, error=NO_ENDPOINTS),
    Row("an-empty-hint-allows-nobody", Asks("shared", subset=()), error=NO_ENDPOINTS),
    Row("a-hint-of-strangers-is-503", Asks("shared", subset=(NOBODY,)), error=NO_ENDPOINTS),
    Row("a-hint-of-an-unready-pod-is-503", Asks("shared", subset=(DRAINING,)), error=NO_ENDPOINTS),
    Row("a-hint-without-the-adapter-is-503", Asks("only-1", subset=(0,)), error=NO_ENDPOINTS),
]

INVALID_JSON, INVALID_HEADER = (400, "invalid_json"), (400, "invalid_header")
BAD_OBJECTIVE = {"x-llm-d-slo-ttft-ms": "bald"}
BAD_HEADER = Asks("shared", headers=BAD_OBJECTIVE, is_late=True)
NOT_SERVED = Asks("shared", path="/load", is_late=True)
GET = Asks(method="GET", has_body=False)
TOO_LARGE = Asks(headers={"content-length": "1000001"}, is_late=True)
REFUSALS = [
    Row("a-body-that-is-no-json-is-400", Asks(chunks=(b"kein JSON",)), error=INVALID_JSON),
    Row("a-body-that-is-cut-off-is-400", Asks(chunks=(b'{"model": "o',)), error=INVALID_JSON),
    Row("no-model-is-400", Asks(chunks=(b'{"n": 1}',)), error=(400, "missing_model")),
    Row("a-model-not-text-is-400", Asks(chunks=(b'{"model": 7}',)), error=(400, "invalid_body")),
    Row("a-request-without-its-body-is-400", Asks(has_body=False), error=INVALID_JSON),
    Row("an-objective-that-is-no-number-is-400", BAD_HEADER, error=INVALID_HEADER),
    Row("a-model-that-nobody-has-is-404", Asks("only-99"), error=(404, "model_not_found")),
    Row("a-path-that-is-not-served-is-404", NOT_SERVED, error=(404, "unknown_path")),
    Row("a-get-of-an-inference-path-is-405", GET, error=(405, "method_not_allowed")),
    Row("a-body-over-the-limit-is-413", TOO_LARGE, error=(413, "body_too_large")),
    Row("the-model-of-a-pod-that-drains-is-503", Asks("only-3"), error=NO_ENDPOINTS),
]

IN_BOTH, IN_VALUE = Spelling(("raw_value", "value")), Spelling(("value",))
IN_GO_S_CASE = Spelling(("value",), is_canonical=True)
NO_REQUEST_LINE = Asks("only-1", mode=None, spelling=Spelling(("value",), has_request_line=False))
SPELLINGS = [
    Row("headers-in-both-fields", Asks("only-1", spelling=IN_BOTH), (1,)),
    Row("headers-in-value-alone", Asks("only-1", spelling=IN_VALUE), (1,)),
    Row("headers-in-value-alone-in-go-s-case", Asks("only-1", spelling=IN_GO_S_CASE), (1,)),
    Row("headers-in-value-without-the-request-line", NO_REQUEST_LINE, (1,)),
    Row(
        "a-control-header-in-value-is-checked",
        Asks("shared", headers=BAD_OBJECTIVE, is_late=True, spelling=IN_VALUE),
        error=INVALID_HEADER,
    ),
]
