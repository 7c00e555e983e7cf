"""ext_proc messages made and read by a second implementation of the wire: envoy-data-plane."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # generated code that newer pydantics find old-fashioned
    import envoy_data_plane.envoy.config.core.v3 as core
    import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as modes
    import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
    from envoy_data_plane.google.protobuf import Struct

BUFFERED = modes.ProcessingModeBodySendMode.BUFFERED
STREAMED = modes.ProcessingModeBodySendMode.STREAMED
FULL_DUPLEX = modes.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED


Metadata = Mapping[str, Mapping[str, Any]]
Spelling = Callable[[str, str], Any]
"""How a data plane writes one header."""


def raw(name: str, value: str) -> Any:
    """As Envoy does: bytes, in `raw_value` alone."""
    return core.HeaderValue(key=name, raw_value=value.encode("latin-1"))


def text(name: str, value: str) -> Any:
    """As text, in `value` alone; of what is no UTF-8 such a data plane can send nothing."""
    return core.HeaderValue(key=name, value=value.encode("latin-1").decode(errors="replace"))


def canonical(name: str, value: str) -> Any:
    """As text, under the name that Go's HTTP server gives it."""
    return text(name if name.startswith(":") else name.title(), value)


SPELLINGS: tuple[Spelling, ...] = (raw, text, canonical)


def http_headers(
    headers: dict[str, str], end_of_stream: bool = False, spelling: Spelling = raw
) -> Any:
    made = [spelling(name, value) for name, value in headers.items()]
    return ext_proc.HttpHeaders(headers=core.HeaderMap(headers=made), end_of_stream=end_of_stream)


def request_headers(
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    end_of_stream: bool = False,
    body_mode: Any = BUFFERED,
    response_body_mode: Any = None,
    early: bool = False,
    metadata: Metadata | None = None,
    spelling: Spelling = raw,
) -> bytes:
    """The first message of a stream; without protocol_config where `body_mode` is None."""
    all_headers = {":method": method, ":path": path, **(headers or {})}
    return message_of_request_headers(
        [spelling(name, value) for name, value in all_headers.items()],
        end_of_stream=end_of_stream,
        body_mode=body_mode,
        response_body_mode=response_body_mode,
        early=early,
        metadata=metadata,
    )


def message_of_request_headers(
    headers: list[Any],
    *,
    end_of_stream: bool = False,
    body_mode: Any = BUFFERED,
    response_body_mode: Any = None,
    early: bool = False,
    metadata: Metadata | None = None,
) -> bytes:
    """The same of headers that are made."""
    made = ext_proc.HttpHeaders(
        headers=core.HeaderMap(headers=headers), end_of_stream=end_of_stream
    )
    message = ext_proc.ProcessingRequest(request_headers=made)
    if body_mode is not None:
        message.protocol_config = ext_proc.ProtocolConfiguration(
            request_body_mode=body_mode,
            response_body_mode=response_body_mode or modes.ProcessingModeBodySendMode.NONE,
            send_body_without_waiting_for_header_response=early,
        )
    return _with(metadata, message)


def _with(metadata: Metadata | None, message: Any) -> bytes:
    if metadata is not None:
        structs = {name: Struct.from_dict(dict(fields)) for name, fields in metadata.items()}
        message.metadata_context = core.Metadata(filter_metadata=structs)
    return bytes(message)


def request_body(
    data: bytes,
    end_of_stream: bool = True,
    metadata: Metadata | None = None,
) -> bytes:
    body = ext_proc.HttpBody(body=data, end_of_stream=end_of_stream)
    return _with(metadata, ext_proc.ProcessingRequest(request_body=body))


def request_trailers() -> bytes:
    return bytes(ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers()))


def response_headers(
    headers: dict[str, str],
    *,
    end_of_stream: bool = False,
    response_body_mode: Any = None,
    metadata: Metadata | None = None,
    spelling: Spelling = raw,
) -> bytes:
    message = ext_proc.ProcessingRequest(
        response_headers=http_headers(headers, end_of_stream, spelling)
    )
    if response_body_mode is not None:
        message.protocol_config = ext_proc.ProtocolConfiguration(
            response_body_mode=response_body_mode
        )
    return _with(metadata, message)


def response_body(data: bytes, end_of_stream: bool = True) -> bytes:
    body = ext_proc.HttpBody(body=data, end_of_stream=end_of_stream)
    return bytes(ext_proc.ProcessingRequest(response_body=body))


def response_trailers() -> bytes:
    return bytes(ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers()))


def read(answer: bytes) -> Any:
    """An answer, read by the other implementation."""
    return ext_proc.ProcessingResponse.parse(answer)


def phase(answer: bytes) -> str:
    """Which field of the answer is set."""
    message = read(answer)
    names = (
        "request_headers",
        "response_headers",
        "request_body",
        "response_body",
        "request_trailers",
        "response_trailers",
        "immediate_response",
    )
    [found] = [name for name in names if getattr(message, name) is not None]
    return found


def destination(answer: bytes) -> tuple[str, str, str] | None:
    """The destination header, the destination in the metadata, and the pick's id."""
    message = read(answer)
    common = getattr(message, phase(answer)).response
    if common is None or common.header_mutation is None:
        assert message.dynamic_metadata is None
        return None
    [option] = [
        option
        for option in common.header_mutation.set_headers
        if option.header.key == "x-gateway-destination-endpoint"
    ]
    assert option.header.value == "", "value and raw_value are never both set"
    assert option.append_action.name == "OVERWRITE_IF_EXISTS_OR_ADD"
    namespaces = message.dynamic_metadata.to_dict()
    assert namespaces["envoy.lb"].keys() == {"x-gateway-destination-endpoint"}
    return (
        option.header.raw_value.decode(),
        namespaces["envoy.lb"]["x-gateway-destination-endpoint"],
        namespaces["extproc.pick"]["id"],
    )
