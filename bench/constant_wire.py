"""The floor of `bench.hold`: our own wire with constants behind it, which decides nothing.

What Envoy does not answer in time with this behind it, it would not answer with any router.

    python -m bench.constant_wire LISTEN HOLD_S POD
"""

from __future__ import annotations

import asyncio
import logging
import sys

import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.request.processor import SERVICE
from extproc.wire import server as wire
from extproc.wire.rpc import Call, Metadata, Method, Session

KEY = "x-gateway-destination-endpoint"
EXTENSION_S = 100


class Hold:
    """Answers the headers, extends the timeout at the body, answers it after the hold."""

    hold_s = 0.0
    answer = b""

    def __init__(self, call: Call, _metadata: Metadata) -> None:
        self._call = call
        self._has_headers = False
        self._timer: asyncio.TimerHandle | None = None

    def receive(self, _message: bytes) -> None:
        if not self._has_headers:
            self._has_headers = True
            self._call.send(_CARRY_ON)
            return
        self._call.send(_EXTEND)
        self._timer = asyncio.get_running_loop().call_later(self.hold_s, self._release)

    def _release(self) -> None:
        self._call.send(self.answer)
        self._call.end()

    def half_close(self) -> None:
        pass

    def closed(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def open_hold(call: Call, metadata: Metadata) -> Session:
    """Begin one RPC."""
    return Hold(call, metadata)


async def serve(address: str, hold_s: float, pod: str) -> None:
    """Serve until killed."""
    response = pb.ProcessingResponse()
    response.request_body.SetInParent()
    response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[KEY].string_value = pod
    Hold.hold_s, Hold.answer = hold_s, response.SerializeToString()
    host, _, port = address.rpartition(":")
    await wire.serve([Method(f"/{SERVICE}/Process", open_hold)], host=host, port=int(port))
    await asyncio.Event().wait()


_carry_on = pb.ProcessingResponse()
_carry_on.request_headers.SetInParent()
_CARRY_ON: bytes = _carry_on.SerializeToString()
_extend = pb.ProcessingResponse()
_extend.override_message_timeout.seconds = EXTENSION_S
_EXTEND: bytes = _extend.SerializeToString()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    uvloop.run(serve(sys.argv[1], float(sys.argv[2]), sys.argv[3]))
