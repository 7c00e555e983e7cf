"""A tiny endpoint picker: `python tinypicker.py PORT PODS_FILE NAMED_IN RECORD`.

It names the pods in turn, in the `header` or in the `metadata`, and writes down which kinds of
messages it gets. The file has an address a line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
from google.protobuf.struct_pb2 import Struct

KEY = "x-gateway-destination-endpoint"
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


class TinyPicker(grpc.GenericRpcHandler):  # type: ignore[type-arg] # not generic at run time
    """Answers the calls of Envoy."""

    def __init__(self, pods: list[str], named_in: str, record: Path) -> None:
        self._pods, self._named_in, self._record = cycle(pods), named_in, record
        self._seen: set[str] = set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if details.method != METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(
            self._process,
            messages.ProcessingRequest.FromString,
            messages.ProcessingResponse.SerializeToString,
        )

    async def _process(
        self, requests: AsyncIterator[messages.ProcessingRequest], _: object
    ) -> AsyncIterator[messages.ProcessingResponse]:
        async for request in requests:
            kind = request.WhichOneof("request")
            self._seen.add(kind)
            self._record.write_text("\n".join(sorted(self._seen)), encoding="utf-8")
            yield self._answer(kind, request)

    def _answer(
        self, kind: str, request: messages.ProcessingRequest
    ) -> messages.ProcessingResponse:
        response = messages.ProcessingResponse()
        answer = getattr(response, kind)
        answer.SetInParent()
        if kind.endswith("body"):
            body = getattr(request, kind)
            streamed = answer.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = body.body, body.end_of_stream
        if kind == "request_headers":
            self._name(next(self._pods), response)
        return response

    def _name(self, pod: str, response: messages.ProcessingResponse) -> None:
        if self._named_in == "header":
            header = HeaderValueOption(header=HeaderValue(key=KEY, raw_value=pod.encode()))
            response.request_headers.response.header_mutation.set_headers.append(header)
        else:
            named = Struct()
            named.update({"envoy.lb": {KEY: pod}})
            response.dynamic_metadata.CopyFrom(named)


async def serve(port: str, pods: str, named_in: str, record: str) -> None:
    addresses = Path(pods).read_text(encoding="utf-8").split()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((TinyPicker(addresses, named_in, Path(record)),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
