"""The reference: an ext_proc server on grpc.aio and uvloop that does as little as can be done.

Per request it reads the headers, reads the body, finds `model` in it, answers with one header and
one metadata field, and ends the RPC with OK. It knows no load, no adapters and no policy: pods are
taken in turn.

    python -m bench.empty_grpcio LISTEN POD...
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import sys
from typing import Any

import grpc
import msgspec
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

KEY = "x-gateway-destination-endpoint"
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_MAX_MESSAGE_BYTES = 32 * 1024 * 1024


class _Body(msgspec.Struct):
    model: str


def _answer(pod: str) -> Any:
    response = pb.ProcessingResponse()
    option = response.request_body.response.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = KEY, pod.encode()
    response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[KEY].string_value = pod
    return response


async def serve(address: str, pods: list[str]) -> None:
    """Serve until SIGTERM."""
    decoder, turns = msgspec.json.Decoder(_Body), itertools.cycle(pods)
    carry_on = pb.ProcessingResponse()
    carry_on.request_headers.SetInParent()

    async def process(_requests: Any, context: Any) -> None:
        await context.read()
        await context.write(carry_on)
        message = await context.read()
        assert decoder.decode(message.request_body.body).model
        await context.write(_answer(next(turns)))

    handler: Any = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server = aio.server(
        options=[
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", 100_000),
        ]
    )
    services = grpc.method_handlers_generic_handler(_SERVICE, {"Process": handler})
    server.add_generic_rpc_handlers((services,))
    server.add_insecure_port(address)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop(None)


if __name__ == "__main__":
    # Where Envoy resets an answered stream before its status is out, grpc.aio logs a traceback;
    # the reference shall not pay for that.
    logging.disable(logging.CRITICAL)
    uvloop.run(serve(sys.argv[1], sys.argv[2:]))
