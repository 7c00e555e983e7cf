"""grpclib, the second implementation of gRPC, with messages as bytes."""

from __future__ import annotations

from typing import Any

from grpclib.encoding.base import CodecBase


class RawCodec(CodecBase):
    """Messages stay bytes."""

    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        return data
