"""A request's body as it arrives, and the model in it.

Complete bodies are read exactly as the engine reads them. A prefix is read only where the data
plane gives no more, or where waiting for the end would stall a body longer than it buffers.
"""

from __future__ import annotations

from collections.abc import Iterator

from extproc.core import rejections
from extproc.core.errors import RequestError
from extproc.core.multipart import model_in_form, model_in_form_prefix
from extproc.core.openai import read_body
from extproc.core.prefix import model_in_prefix
from extproc.core.routes import RESPONSES_PATH, Route, RouteKind
from extproc.core.types import Reason

MAX_ECHO_BYTES = 62_000
"""Envoy refuses streamed chunks over 64 KiB; the Gateway API's pickers use 62,000 bytes."""

CHUNK_OVERHEAD_BYTES = 48
"""What keeping a chunk costs beside its bytes (CPython: 33 for the object, 8 for its place): a
client may send two bytes at a time."""

MAX_WHOLE_TRIES = 8
"""Times that a streamed body which ends in a brace is read as if it were whole. Each costs a pass
over it, and a client chooses where its chunks end."""

_UNFINISHED = (Reason.INVALID_JSON, Reason.INVALID_BODY)
"""What a body that was cut off looks like to a reader of complete bodies."""


class BodyReader:
    """Collects chunks up to a limit and finds the model.

    `num_bytes` is what came, `held_bytes` what is kept of it now.

    Args:
        route: What kind of body it is.
        content_type: The request's header; a form's boundary stands in it.
        max_bytes: Limit for all chunks together.
        allows_stored: `previous_response_id` may be used (a session header is configured).
        first_look_bytes: Size from which on a prefix is looked at.
    """

    __slots__ = (
        "_allows_stored",
        "_content_type",
        "_max_bytes",
        "_next_look_bytes",
        "_route",
        "_tries_left",
        "chunks",
        "held_bytes",
        "num_bytes",
    )

    def __init__(
        self,
        route: Route,
        content_type: str,
        *,
        max_bytes: int,
        allows_stored: bool,
        first_look_bytes: int,
    ) -> None:
        self._route = route
        self._content_type = content_type
        self._max_bytes = max_bytes
        self._allows_stored = allows_stored
        self._next_look_bytes = first_look_bytes
        self._tries_left = MAX_WHOLE_TRIES
        self.chunks: list[bytes] = []
        self.num_bytes = 0
        self.held_bytes = 0

    def add(self, data: bytes) -> None:
        """Take a chunk.

        Raises:
            RequestError: 413, the limit is passed.
        """
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise RequestError(rejections.too_large(self._max_bytes))
        self.chunks.append(data)
        self.held_bytes += len(data) + CHUNK_OVERHEAD_BYTES

    def model(self) -> str:
        """The model of a complete body; "" for a stored response, which names none.

        Raises:
            RequestError: 400 or 415, whatever is wrong with it.
        """
        body = self._joined()
        if self._route.kind is RouteKind.STORED_RESPONSE:
            return ""
        if self._route.kind is RouteKind.INFERENCE_FORM:
            return model_in_form(body, self._content_type)
        fields = read_body(body)
        refers = self._route.path == RESPONSES_PATH and fields.previous_response_id is not None
        if refers and not self._allows_stored:
            raise RequestError(rejections.stored_response())
        return fields.model

    def model_of_part(self) -> str:
        """The model of a body that may be cut off, or whole with nothing to say so.

        Raises:
            RequestError: As `model`; 413 if it is cut off before the model.
        """
        try:
            # Trailers leave end_of_stream unset on a whole body, too.
            return self.model()
        except RequestError as error:
            if error.rejection.reason not in _UNFINISHED:
                raise
        model = self._prefix_model()
        if model is None:
            raise RequestError(rejections.too_large(self.num_bytes))
        return model

    def model_so_far(self) -> str | None:
        """The model if the chunks make a whole body, or are enough to look and it stands in them.

        A body with trailers may be whole with nothing to say so: the data plane holds the trailers
        back until the headers are answered. A prefix is looked at again only when it has doubled,
        which keeps the work linear.
        """
        if self._tries_left and self.chunks[-1].rstrip().endswith(b"}"):
            self._tries_left -= 1
            try:
                return self.model()
            except RequestError as error:
                if error.rejection.reason not in _UNFINISHED:
                    raise
        if self.num_bytes < self._next_look_bytes:
            return None
        self._next_look_bytes = 2 * self.num_bytes
        return self._prefix_model()

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """The whole body cut into chunks that Envoy takes; (chunk, is it the last).

        None where no chunk ever came: what was not sent is not echoed.
        """
        return pieces(self._joined()) if self.chunks else iter(())

    def forget(self) -> None:
        """Drop the bytes and keep the number of chunks: the data plane holds the body itself."""
        self.chunks = [b""] * len(self.chunks)
        self.held_bytes = 0

    def clear(self) -> None:
        """Forget the bytes; the count stays."""
        self.chunks.clear()
        self.held_bytes = 0

    def _joined(self) -> bytes:
        chunks = self.chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _prefix_model(self) -> str | None:
        if self._route.kind is RouteKind.INFERENCE_FORM:
            return model_in_form_prefix(self._joined(), self._content_type)
        return model_in_prefix(self._joined())


def pieces(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Cut `data` into chunks that Envoy takes; (chunk, is it the last). At least one."""
    for start in range(0, max(len(data), 1), MAX_ECHO_BYTES):
        yield data[start : start + MAX_ECHO_BYTES], start + MAX_ECHO_BYTES >= len(data)
