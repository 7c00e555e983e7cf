"""The model that a client wrote, put back into the response of a pod that read another one.

1. It is put back where the pod names the model that it read. That is the first such `model` of a
   JSON body, and of each event of a stream: at the top level, or in its `response` or `message`
   (`/v1/responses`, `/v1/messages`). No other byte changes.
2. Bytes go on as they come, however the body is split. Only a part of a value of `model` is kept
   until the rest of it is there.
3. Compressed bodies, other types and malformed JSON go on as they are.
"""

from __future__ import annotations

import json
import re

import msgspec

from extproc.errors import RequestError
from extproc.request.bodyslices import Place
from extproc.request.jsonmodel import JsonReader

_ENTERED = frozenset((b"response", b"message"))
_FIELD = b"data:"
_LINE_END = re.compile(rb"[\r\n]")


def restorer_of(
    content_type: str, content_encoding: str, *, served: str, written: str
) -> Restorer | None:
    """Return what changes a response with these headers; None for one that stays as it is.

    Args:
        served: The model that the pod read.
        written: The model that the client wrote.
    """
    if content_encoding.strip().lower() not in ("", "identity"):
        return None
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "text/event-stream":
        return EventRestorer(served, written)
    return JsonRestorer(served, written) if kind == "application/json" else None


class JsonRestorer:
    """Changes one JSON body.

    Attributes:
        value: That stands for the model from now on.
        place: Of the value that was changed, in the body; None before.
        is_done: The rest goes on as it comes.
        is_undone: The pod names the client's model: it has read that one.
    """

    def __init__(self, served: str, written: str) -> None:
        self._served, self._written = served, written
        self.is_undone = False
        self.value = msgspec.json.encode(written)
        self._reader = JsonReader(lambda _model: True, enters=_ENTERED)
        self._num_bytes = self._num_places = 0
        self._kept = b""
        self.place: Place | None = None
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """Return what goes on, now that `data` has come."""
        if self.is_done:
            return data
        text, begin = self._kept + data, self._num_bytes - len(self._kept)
        self._num_bytes += len(data)
        try:
            found = self._read(text, begin, data)
        except RequestError:
            return self.end() + data
        if found is None:
            cut = len(text) if self._reader.pending_at is None else self._reader.pending_at - begin
            self._kept = text[cut:]
            return text[:cut]
        first, last = found
        self.place, self.is_done, self._kept = (first + begin, last + begin), True, b""
        return text[:first] + self.value + text[last:]

    def end(self) -> bytes:
        """Return what was kept; no more will come."""
        kept, self._kept, self.is_done = self._kept, b"", True
        return kept

    def end_line(self) -> bytes:
        """Return what was kept at the end of a line: no value goes on behind it."""
        return self.end() if self._kept else b""

    def _read(self, text: bytes, begin: int, data: bytes) -> Place | None:
        """Read on; return the place of the model in `text`, which begins at `begin`."""
        reader, at = self._reader, 0
        while at < len(data):
            at = reader.feed(data, at)
            for first, last in reader.places[self._num_places :]:
                self._num_places += 1
                token = text[first - begin : last - begin]
                if _is_name(token, self._served):
                    return first - begin, last - begin
                self.is_undone = self.is_undone or _is_name(token, self._written)
        return None


class EventRestorer:
    """Changes a stream of server-sent events, each with JSON in its lines of data.

    The events of a response begin alike, up to their model. After the first one, that part is
    recognised without reading it again.

    Attributes:
        is_undone: As of `JsonRestorer`.
    """

    def __init__(self, served: str, written: str) -> None:
        self.is_undone = False
        self._served, self._written = served, written
        self._prefix = self._new_prefix = b""
        self._event: JsonRestorer | None = None  # from the first line of data on
        self._num_matched: int | None = 0  # bytes of the field's name; None behind it
        self._is_data = False
        self._follows_cr = False

    def feed(self, data: bytes) -> bytes:
        """Return what goes on, now that `data` has come."""
        parts: list[bytes] = []
        at, may_skip = 0, b"\r" not in data
        while at < len(data):
            if self._num_matched is None:
                at = self._rest_of_line(data, at, parts)
            elif may_skip and not self._num_matched and self._event is None:
                at = self._known_event(data, at, parts) or self._begin_line(data, at, parts)
            else:
                at = self._begin_line(data, at, parts)
        return b"".join(parts)

    def end(self) -> bytes:
        """Return what was kept; no more will come."""
        return b"" if self._event is None else self._event.end()

    def _known_event(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Let a whole event go on that begins like the first one; return 0 if there is none."""
        if not self._prefix or not data.startswith(self._prefix, at):
            return 0
        behind = at + len(self._prefix)
        end = data.find(b"\n\n", behind)
        if end < 0:
            return 0
        parts += (self._new_prefix, data[behind : end + 2])
        return end + 2

    def _begin_line(self, data: bytes, at: int, parts: list[bytes]) -> int:
        """Read the name of a field, or an empty line, which ends an event."""
        first, matched = data[at : at + 1], self._num_matched or 0
        if first in (b"\r", b"\n"):
            if not matched and not (self._follows_cr and first == b"\n"):
                self._event = None
            self._follows_cr, self._num_matched = first == b"\r", 0
            parts.append(first)
            return at + 1
        self._follows_cr = False
        wanted = _FIELD[matched:]
        found = data[at : at + len(wanted)]
        if found == wanted:
            self._num_matched, self._is_data = None, True
        elif wanted.startswith(found):
            self._num_matched = matched + len(found)
        else:
            self._num_matched, self._is_data = None, False
            return at
        parts.append(found)
        return at + len(found)

    def _rest_of_line(self, data: bytes, at: int, parts: list[bytes]) -> int:
        found = _LINE_END.search(data, at)
        end = len(data) if found is None else found.end()
        line = data[at:end]
        parts.append(self._changed(line, data, at) if self._is_data else line)
        if found is not None:
            self._num_matched, self._follows_cr = 0, found[0] == b"\r"
            if self._event is not None:
                parts.append(self._event.end_line())
        return end

    def _changed(self, line: bytes, data: bytes, at: int) -> bytes:
        """Return a part of a line of data, which stands at `at` of what has come."""
        event = self._event
        if event is not None:
            return self._fed(event, line)
        event = self._event = JsonRestorer(self._served, self._written)
        new, name_at = self._fed(event, line), at - len(_FIELD)
        if event.place is not None and name_at >= 0:
            begin, end = event.place
            self._prefix = data[name_at : at + end]
            self._new_prefix = data[name_at : at + begin] + event.value
        return new

    def _fed(self, event: JsonRestorer, line: bytes) -> bytes:
        new = event.feed(line)
        self.is_undone = self.is_undone or event.is_undone
        return new


Restorer = JsonRestorer | EventRestorer
"""Changes one body on its way."""


def _is_name(token: bytes, name: str) -> bool:
    try:
        return token.startswith(b'"') and json.loads(token) == name
    except ValueError:
        return False
