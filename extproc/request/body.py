"""A request's body as it arrives, and the model in it.

Every chunk is read once, pass by pass, and freed. No pass holds the event loop for more than some
milliseconds. Only bytes that still have to be sent on are kept. A part of a body decides only where
the data plane sends no more, or where waiting for the end would stall a body longer than it
buffers. The rest must then name the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import Raw

from extproc import rejections
from extproc.errors import RequestError
from extproc.openai import check_model
from extproc.paths import NO_PATH, ONE_PROMPT_PATHS, RESPONSES_PATH, Route, RouteKind
from extproc.request.jsonmodel import JsonReader
from extproc.request.jsonsmall import SMALL_BYTES, is_cut_off
from extproc.request.multipart import FormReader
from extproc.request.sessions import NO_SESSION, NO_SOURCES, SessionSources

MAX_ECHO_BYTES = 62_000
"""Envoy refuses streamed chunks over 64 KiB; the Gateway API's pickers use 62,000 bytes."""

MAX_ECHOED = 8
"""Chunks of a body that are sent on in one pass: half a megabyte, a millisecond."""

CHUNK_OVERHEAD_BYTES = 48
"""Memory that a kept chunk takes besides its bytes (CPython: 33 for the object, 8 for its place): a
client may send two bytes at a time."""


MAX_CHECKS = 8
"""Of whether a body is whole, without a sign of it; from then on it is read in slices."""


class BodyReader:
    """Takes chunks up to a limit, reads them and finds the model.

    Args:
        route: The kind of body.
        content_type: The request's header, which names a form's boundary.
        max_bytes: Limit for all chunks together.
        allows_stored: `previous_response_id` may be used: the headers name a session.
        early_bytes: Size from which a part may decide.
        is_echoed: The body is ours to send on, so that it has to be kept.
        takes_adapter: As `JsonReader`.
        removes: Fields to be cut out, as `JsonReader`; a form that has one is refused.
        sessions: As `JsonReader`.

    Attributes:
        num_bytes: Of all chunks together.
        held_bytes: Of those kept now: not read yet, or to be sent on.
    """

    __slots__ = (
        *("_allows_stored", "_at", "_content_type", "_early_bytes", "_is_echoed", "_is_gathering"),
        *("_concerns", "_is_kept"),
        *(
            "_kept",
            "_max_bytes",
            "_num_done",
            "_num_joined",
            "_num_checks",
            "_reader",
            "_removes",
            "_route",
            "_sessions",
            "_settled",
            "_takes_adapter",
        ),
        *("_unread", "held_bytes", "num_bytes"),
    )

    def __init__(
        self,
        route: Route,
        content_type: str,
        *,
        max_bytes: int,
        allows_stored: bool,
        early_bytes: int,
        is_echoed: bool = False,
        takes_adapter: bool = False,
        removes: frozenset[str] = frozenset(),
        sessions: SessionSources = NO_SOURCES,
    ) -> None:
        self._sessions = sessions
        self._removes = removes
        self._route = route
        self._content_type = content_type
        self._max_bytes = max_bytes
        self._allows_stored = allows_stored
        self._early_bytes = early_bytes
        self._is_echoed = is_echoed
        self._takes_adapter = takes_adapter
        self._is_kept = is_echoed
        self._concerns: Callable[[str], bool] | None = None
        self._reader: JsonReader | FormReader | None = None
        self._unread: list[bytes | memoryview] = []
        self._at = 0  # how much of the first unread chunk has been read
        self._kept: list[bytes | memoryview] = []
        self._num_done = 0
        self._num_joined = 1  # chunks that the first unread one was made of
        self._is_gathering = route.kind is not RouteKind.INFERENCE_FORM
        self._num_checks = 0
        self._settled: str | None = None
        self.num_bytes = self.held_bytes = 0

    @property
    def is_read(self) -> bool:
        """Whether all that came has been read."""
        return not self._unread

    def keep(self, concerns: Callable[[str], bool]) -> None:
        """Keep the body, of which nothing has come yet, until `rewrite` or `leave`.

        `concerns` returns whether `rewrite` may come, for a model; "" stands for none.
        """
        self._is_kept, self._concerns = True, concerns

    def add(self, data: bytes | memoryview) -> None:
        """Add a chunk for `read`; raise RequestError (413) if it exceeds the limit."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise RequestError(rejections.too_large(self._max_bytes))
        self.held_bytes += len(data) + CHUNK_OVERHEAD_BYTES
        self._unread.append(data)
        if self._is_kept:
            self._kept.append(data)

    def read(self, *, is_over: bool = False) -> bool:
        """Read one pass and free it; return whether all chunks so far have been read.

        A body that may still turn out small is not read before `is_over`: read at once, it is
        read twenty times as fast.

        Raises:
            RequestError: 400 or 415, it is malformed, or names another model than settled.
        """
        if not self._unread:
            return True
        if self._is_gathering:
            if not is_over and self._may_be_small():
                return True
            self._gather()
        data = self._unread[0]
        at = self._feed(data)
        if at < len(data):
            self._at = at
            return False
        del self._unread[0]
        self._at = 0
        self._num_done += self._num_joined
        self._num_joined = 1
        if self.cut and not self._is_kept:  # the whole body, where it can be changed
            self._is_kept = True
            self._kept.append(data)
        if not self._is_kept:
            self.held_bytes -= len(data) + CHUNK_OVERHEAD_BYTES
        return not self._unread

    @property
    def cut(self) -> str:
        """A field so far that is to be cut out; "" for none."""
        return "" if self._reader is None else self._reader.cut

    def _may_be_small(self) -> bool:
        """Return whether to wait for more; not where only trailers may follow."""
        if self.num_bytes >= min(SMALL_BYTES, self._early_bytes):
            return False
        if self._is_echoed or not bytes(self._unread[-1]).rstrip().endswith(b"}"):
            return True
        self._num_checks += 1
        return self._num_checks <= MAX_CHECKS and is_cut_off(b"".join(self._unread))

    def _gather(self) -> None:
        """Join the chunks so far: the reader reads a small body as a whole."""
        self._is_gathering = False
        self._num_joined = len(self._unread)
        if self._num_joined > 1:
            self._unread = [b"".join(self._unread)]
            if not self._is_kept:
                self.held_bytes -= (self._num_joined - 1) * CHUNK_OVERHEAD_BYTES

    def model(self) -> str:
        """Return the model of a complete body, or raise RequestError; "" for a stored response."""
        if self._route.kind is RouteKind.STORED_RESPONSE:
            return ""
        reader = self._reader or self._made_reader()
        model = reader.result()
        if reader.refers_back:
            self._check_reference(reader)
        return model

    def model_of_part(self) -> str:
        """Return the model of a body that may be incomplete, or whole without a sign of it.

        Raises RequestError as `model`, and 413 if the body ends before the model.
        """
        model = self._model_if_seen()
        if model is None:
            raise RequestError(rejections.too_large(self.num_bytes))
        return model

    def model_so_far(self) -> str | None:
        """Return the model if the body is whole, or long enough to decide and the model is in it.

        A body with trailers may be whole without a sign of it: the data plane holds the trailers
        back until the headers are answered. Raises RequestError as `model`.
        """
        is_enough = self.num_bytes >= self._early_bytes
        return self._model_if_seen() if is_enough or self._made_reader().is_whole else None

    def settle(self, model: str) -> None:
        """Require the rest of the body to name the model that has decided. A session that it names
        has no say any more."""
        self._allows_stored = self._names_session
        self._settled = model

    def take_done(self) -> int:
        """Return the number of chunks read since the last call."""
        done, self._num_done = self._num_done, 0
        return done

    def rewrite(self, model: str | None) -> bytes:
        """Replace the model of a whole body that was to be kept, None to leave it; cut out what is
        to be; return the new body.
        """
        kept, reader = self._kept, self._made_reader()
        whole = kept[0] if len(kept) == 1 else b"".join(kept)  # a copy of 16 MiB takes 8 ms
        if model is not None:
            data = reader.rewritten(memoryview(whole), model)
        else:
            assert isinstance(reader, JsonReader)
            data = reader.without_cuts(memoryview(whole))
        self._kept = [data]
        self.held_bytes = len(data) + CHUNK_OVERHEAD_BYTES
        return data

    def leave(self) -> None:
        """Free a body that has been read and stays as it is, unless it is ours to send on."""
        if not self._is_echoed and not self.cut:
            self._kept.clear()
            self.held_bytes = 0

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Cut the whole body as `pieces` does; nothing where no chunk ever came."""
        return pieces(*self._kept) if self._kept else iter(())

    @property
    def num_sequences(self) -> int:
        """The sequences that an engine runs for the body so far; 1 for a form."""
        return self._reader.num_sequences if isinstance(self._reader, JsonReader) else 1

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of an answer by the body so far; None where it does not say."""
        return self._reader.max_tokens if isinstance(self._reader, JsonReader) else None

    @property
    def fields(self) -> Mapping[str, bytes]:
        """Those of a JSON body so far that may name the session."""
        return self._reader.fields if isinstance(self._reader, JsonReader) else {}

    def take_prompt(self) -> tuple[Raw, ...]:
        """Return the parts of a small JSON body's prompt, in JSON, and keep it no longer; () for
        other bodies.
        """
        return self._reader.take_prompt() if isinstance(self._reader, JsonReader) else ()

    def forget(self) -> None:
        """Free the reader of a body that is over, whose model is known, and that stays as it is."""
        if not self.cut:
            self._reader = None

    def clear(self) -> None:
        """Free the kept chunks; the whole body has been answered, or will not be."""
        self.take_prompt()
        self._unread.clear()
        self._kept.clear()
        self._at = self._num_done = self.held_bytes = 0

    def _feed(self, data: bytes | memoryview) -> int:
        if self._route.kind is RouteKind.STORED_RESPONSE:
            return len(data)
        reader = self._reader or self._made_reader()
        at = reader.feed(data, self._at)
        if self._settled is not None:
            if reader.model != self._settled:
                raise RequestError(rejections.TWO_MODELS)
            self._check_reference(reader)
        return at

    def _made_reader(self) -> JsonReader | FormReader:
        if self._reader is None:
            if self._route.kind is RouteKind.INFERENCE_FORM:
                self._reader = FormReader(self._content_type, removes=self._removes)
            else:
                self._reader = JsonReader(
                    self._concerns,
                    has_one_prompt=self._route.path in ONE_PROMPT_PATHS,
                    takes_adapter=self._takes_adapter,
                    removes=self._removes,
                    sessions=self._sessions,
                )
        return self._reader

    def _model_if_seen(self) -> str | None:
        reader = self._made_reader()
        if reader.is_whole or self._route.kind is RouteKind.STORED_RESPONSE:
            return self.model()
        if reader.model is None:
            return None
        self._check_reference(reader)
        return check_model(reader.model)

    @property
    def _names_session(self) -> bool:
        return self._allows_stored or (
            self._settled is None and self._sessions.find({}, self.fields) != NO_SESSION
        )

    def _check_reference(self, reader: JsonReader | FormReader) -> None:
        refers = self._route.path in (RESPONSES_PATH, NO_PATH) and reader.refers_back
        if refers and not self._names_session:
            raise RequestError(rejections.STORED_RESPONSE)


def pieces(*chunks: bytes | memoryview) -> Iterator[tuple[bytes, bool]]:
    """Cut what these make into chunks that Envoy accepts, at least one, each when it is asked for:
    (chunk, whether it is the last)."""
    num_left = sum(map(len, chunks))
    piece, wanted = list[bytes | memoryview](), MAX_ECHO_BYTES
    for chunk in chunks:
        while len(chunk) >= wanted and num_left > MAX_ECHO_BYTES:
            piece.append(memoryview(chunk)[:wanted])
            num_left -= MAX_ECHO_BYTES
            yield b"".join(piece), False
            chunk = memoryview(chunk)[wanted:]
            piece, wanted = [], MAX_ECHO_BYTES
        piece.append(chunk)
        wanted -= len(chunk)
    yield b"".join(piece), True
