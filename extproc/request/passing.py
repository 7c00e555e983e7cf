"""An endpoint's response on its way to the client: changed where it has to be, and judged by."""

from __future__ import annotations

from extproc.learned.evidence import Evidence, StreamEnd, by_status
from extproc.request import messages as m
from extproc.request.body import pieces
from extproc.request.interfaces import StreamSettings
from extproc.request.lostrewrites import NOT_FOUND
from extproc.request.messages import IN_CHUNKS, BodyMode
from extproc.request.restoring import Restorer, restorer_of
from extproc.types import Outcome, Pick, RequestInfo


def body_mode(stated: BodyMode | None, settings: StreamSettings) -> BodyMode:
    """Return how a response's body will come; full duplex is assumed to be both ways."""
    if stated is not None:
        return stated
    assumed = settings.assumed_body_mode
    return assumed if assumed is BodyMode.FULL_DUPLEX_STREAMED else BodyMode.NONE


def may_restore(request: RequestInfo, mode: BodyMode, settings: StreamSettings) -> bool:
    """Return whether the response may have to name another model than the pod's."""
    is_wanted = settings.restore_model if request.restores_model is None else request.restores_model
    return bool(request.written) and is_wanted and mode is not BodyMode.NONE


class Passing:
    """One response, as its parts pass by; nothing of it has before `begin`.

    Args:
        mode: How its body comes.
    """

    __slots__ = (
        *("_content_type", "_is_whole", "_mode", "_num_bytes", "_restorer", "_status"),
        "_watched",
    )

    def __init__(self, mode: BodyMode) -> None:
        self._mode = mode
        self._status = self._num_bytes = 0
        self._content_type, self._is_whole = "", False
        self._restorer: Restorer | None = None
        self._watched: RequestInfo | None = None  # a rewritten one that may have been undone

    def begin(
        self, event: m.ResponseHeaders, pick: Pick, settings: StreamSettings
    ) -> list[m.Command]:
        """Let the headers go on."""
        self._status, self._content_type = event.status, event.content_type
        self._is_whole = event.end_of_stream
        request = pick.request
        if may_restore(request, self._mode, settings) and not event.end_of_stream:
            self._restorer = restorer_of(
                event.content_type,
                event.content_encoding,
                served=request.model,
                written=request.written,
            )
        if request.written:
            self._watched = request
        return [m.ContinueResponseHeaders(drops_length=self._restorer is not None)]

    def body(self, event: m.ResponseBody) -> list[m.Command]:
        """Let a part of the body go on, changed where the client's model has to be put back."""
        self._num_bytes += len(event.data)
        self._is_whole = event.end_of_stream
        mode, restorer, data = self._mode, self._restorer, event.data
        is_duplex = mode is BodyMode.FULL_DUPLEX_STREAMED
        if restorer is not None:
            data = restorer.feed(data)
            if event.end_of_stream or mode not in IN_CHUNKS:
                data += restorer.end()
            if is_duplex and not data and not event.end_of_stream:
                return []  # all of it is kept for now
        if not is_duplex:
            return [m.ContinueResponseBody(None if restorer is None else data)]
        return [
            m.EchoResponseBody(part, last and event.end_of_stream) for part, last in pieces(data)
        ]

    def trailers(self) -> list[m.Command]:
        """Let the trailers go on, behind what was kept of the body."""
        self._is_whole = True
        kept = b"" if self._restorer is None else self._restorer.end()
        if kept and self._mode is BodyMode.FULL_DUPLEX_STREAMED:
            return [m.EchoResponseBody(kept), m.ContinueResponseTrailers()]
        return [m.ContinueResponseTrailers()]

    def take_undone(self, data: bytes | None) -> RequestInfo | None:
        """Return, once, a request whose pod has read the client's model instead of our rewrite.

        A part of the response tells: the message of an error names the model. Where no body comes
        (None), the status has to do.
        """
        request, restorer = self._watched, self._restorer
        if request is None:
            return None
        if self._status == NOT_FOUND:
            is_undone = data is None or request.written.encode() in data
        else:
            is_undone = restorer is not None and restorer.is_undone
        if not is_undone:
            return None
        self._watched = None
        return request

    def end(self) -> StreamEnd:
        """Return what the response says of the request and its endpoint, as far as it has passed.

        Where its end did not, the data plane does not tell whether the endpoint has broken off or
        the client has left: either resets the RPC. A local reply of Envoy's is plain text.
        """
        status, is_whole = self._status, self._is_whole
        if status == 0:
            return StreamEnd(Outcome.CANCELLED, Evidence.UNANSWERED, self._num_bytes)
        verdict = by_status(status, is_whole=is_whole)
        if status < 500:
            outcome = Outcome.COMPLETED if is_whole else Outcome.UNKNOWN
            return StreamEnd(outcome, verdict, self._num_bytes)
        if self._content_type.startswith("text/plain"):
            verdict = Evidence.BROKEN
        return StreamEnd(Outcome.FAILED, verdict, self._num_bytes)
