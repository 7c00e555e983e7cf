"""CPU time of rewriting `model` and of putting it back: no sockets, no choice of an endpoint."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, cast

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from bench.figures import render_table
from extproc.openai import Spelling
from extproc.request import messages as m
from extproc.request.codec import Codec
from extproc.request.interfaces import Dispatcher, StreamSettings
from extproc.request.messages import BodyMode
from extproc.request.restoring import EventRestorer
from extproc.request.stream import Stream
from extproc.routing.rewrites import Rewrites, Rule
from extproc.types import Pick, RequestInfo

BODY_BYTES = (308, 107_000)
NUM_EVENTS = 100
_ROUNDS = 21
_PER_ROUND_S = 0.03
_MODEL, _TARGET = "sql-expert", "sql-expert@2026-11"
_RULES = {
    "no rules": (),
    "rules for others": (Rule("r", ("other",), ((_TARGET, None),)),),
    "rewritten": (Rule("r", (_MODEL,), ((_TARGET, None),)),),
}


class _Fixed:
    """A dispatcher with one endpoint, so that nothing but bodies costs anything."""

    uses_prefix_hashes = False
    spelling = Spelling(lambda _name: None, False)

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rewrites = Rewrites(rules, rng=Random(1))

    @property
    def may_rewrite(self) -> bool:
        return self._rewrites.is_active

    def concerns(self, model: str) -> bool:
        return self._rewrites.concerns(model)

    def is_declared(self, model: str) -> bool:
        return self._rewrites.is_declared(model)

    def target_of(self, model: str, hinted: str) -> str:
        return self._rewrites.target(model, hinted)

    def route(self, request: RequestInfo, **_: Any) -> Pick:
        return Pick("bench-1", request, ("10.0.0.1:8000",), "p", "r")

    def gone(self, *_: Any, **__: Any) -> None:
        pass


def request_us(rules: Sequence[Rule], body_bytes: int, mode: BodyMode) -> Callable[[], object]:
    """Return what handles one request, from ext_proc messages to ext_proc messages."""
    body = json.dumps({"messages": [{"role": "user", "content": ""}], "model": _MODEL})
    body = body.replace('""', json.dumps("x" * (body_bytes - len(body))), 1)
    headers, data = pb.ProcessingRequest(), pb.ProcessingRequest()
    fields = {":method": "POST", ":path": "/v1/chat/completions", "content-length": str(body_bytes)}
    for key, value in fields.items():
        headers.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    headers.protocol_config.request_body_mode = mode.value
    data.request_body.body, data.request_body.end_of_stream = body.encode(), True
    messages = [headers.SerializeToString(), data.SerializeToString()]
    dispatcher, codec, settings = _Fixed(rules), Codec(), StreamSettings()

    def handle() -> None:
        stream = Stream(cast(Dispatcher, dispatcher), settings, lambda: None)
        for message in messages:
            for command in stream.handle(codec.decode(message), now=1.0):
                if not isinstance(command, m.End):
                    codec.encode(command)

    return handle


def events_us(*, restores: bool) -> Callable[[], object]:
    """Return what sends the events of one streamed response on, each in a message of its own."""
    head = f'data: {{"id":"chatcmpl-1","object":"chat.completion.chunk","model":"{_TARGET}"'
    choice = ',"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
    message = pb.ProcessingRequest()
    message.response_body.body = (head + choice).encode()
    event, codec = message.SerializeToString(), Codec()

    def handle() -> None:
        restorer = EventRestorer(_TARGET, _MODEL) if restores else None
        for _ in range(NUM_EVENTS):
            decoded = codec.decode(event)
            assert isinstance(decoded, m.ResponseBody)
            data = decoded.data if restorer is None else restorer.feed(decoded.data)
            codec.encode(m.EchoResponseBody(data))

    return handle


def measure(handlers: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return each one's CPU microseconds, the median of rounds in which all take turns."""
    found: dict[str, list[float]] = {name: [] for name in handlers}
    for _ in range(_ROUNDS):
        for name, handle in handlers.items():
            count, began_s = 0, time.process_time()
            while (taken_s := time.process_time() - began_s) < _PER_ROUND_S:
                for _ in range(10):
                    handle()
                count += 10
            found[name].append(1e6 * taken_s / count)
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.rewrite", description=__doc__)
    parser.parse_args(arguments)
    rows = []
    for mode in (BodyMode.BUFFERED, BodyMode.FULL_DUPLEX_STREAMED):
        for size in BODY_BYTES:
            handlers = {name: request_us(rules, size, mode) for name, rules in _RULES.items()}
            times = measure(handlers)
            rows.append([f"{mode.name}, {size:,} B", *(f"{each:.1f}" for each in times.values())])
    print(render_table(["CPU us per request", *_RULES], rows))
    times = measure({"as it is": events_us(restores=False), "restored": events_us(restores=True)})
    row = ["one event", *(f"{each / NUM_EVENTS:.2f}" for each in times.values())]
    print(render_table(["CPU us per event of a response", *times], [row]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
