"""Read `model` from a JSON body that arrives in pieces, at a cost that its length bounds.

The engine reads a body with Python's `json.loads` (Starlette's `Request.json`), and that is the
meaning of a body here too. Of every body that `json.loads` reads as an object, this reads the same
`model` or refuses it, and never reads another one. It is the last `model`, escapes decoded, with
NaN, lone surrogates and a byte order mark around it. JSON in UTF-16 or UTF-32 is refused: RFC 8259
allows UTF-8 alone.

Only the top level is parsed; nested values are skipped unchecked (`jsonskip`), so a body may pass
that the engine rejects with 400. A small whole body is read by msgspec, which checks all of it; a
body that msgspec refuses but Python may accept is read slice by slice like any other.

msgspec alone would read 16 MiB in one go, while all other requests wait. On an EPYC core it took 7
ms for one string, but 75 for numbers, 49 for brackets, 37 for objects and 23 for escapes. It also
refuses deep nesting, which Python accepts up to a depth.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import astuple

from extproc import rejections
from extproc.bounds import MAX_SEQUENCES
from extproc.errors import RequestError
from extproc.openai import MAX_MODEL_BYTES, check_model, joined
from extproc.request.bodyslices import IncrementalReader, Place, State, with_values
from extproc.request.jsonskip import ContainerSkipper, StringSkipper
from extproc.request.jsonsmall import (
    LISTS,
    NO_STEERING,
    NUMBERS,
    PROMPT,
    SMALL_BYTES,
    STEERING,
    Members,
    find_model,
    max_tokens,
    num_sequences,
    read_members,
    sequences,
)
from extproc.request.sessions import (
    MAX_FIELD_CHARS,
    MAX_SESSION_BYTES,
    NO_SOURCES,
    SessionSources,
    string_of,
)
from extproc.request.steering import FIELDS
from extproc.types import Reason, Rejection

_UNITS_PER_MEMBER = 256

MAX_MEMBERS = 1024
"""Top-level members of a body that msgspec does not read. Requests have some tens."""

_MAX_MODEL_TOKEN_BYTES = 2 + 6 * MAX_MODEL_BYTES
_MAX_KEY_TOKEN_BYTES = 2 + 6 * max(MAX_FIELD_CHARS, *map(len, FIELDS))
"""A character may be written as `\\uXXXX`: six bytes for what may be one."""

_FIELDS = frozenset(name.encode() for name in FIELDS)
_NUMBERS = frozenset(name.encode() for name in NUMBERS)
_LISTS = frozenset(name.encode() for name in LISTS)
_MAX_NUMBER_BYTES = 64
"""Of a number that is read, or of a string that an engine may take for one."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]*")

_NO_STRING = 0
_TOO_LONG = "x" * (MAX_MODEL_BYTES + 1)
"""Stand for a `model` that was not kept; `check_model` reports what is wrong with it."""


def _after_space(state: State) -> State:
    """Make a state skip white space, and wait for a byte behind it."""

    def read(reader: JsonReader, part: bytes, pos: int) -> int:
        pos = _behind_all(_SPACE, part, pos)
        return state(reader, part, pos) if pos < len(part) else pos

    return read


class JsonReader(IncrementalReader):
    """One body, slice by slice. Keeps at most one unfinished key or model name of it.

    Args:
        needs_places: Returns whether `places` and `rewritten` are wanted of a small body with this
            model, "" for none; one with several keys `model` is then read in slices. None: never.
        enters: Keys of objects whose members count as top-level ones.
        has_one_prompt: As the path takes no more, no list counts as one of prompts.
        takes_adapter: A `lora_path` beside `model` names an adapter of it, as SGLang has it.
        removes: Keys of top-level members to be cut out.
        sessions: Say which fields may name the session.

    Attributes:
        fields: Those so far, as they are written; b"" for one that cannot name a session.
        cuts: Where those are, with a comma each, so that the rest is JSON.
        cut: The key of the last of them so far, "" for none.
        prompt: Of a small whole body, the parts of which the engine makes its prompt, in the usual
            order of chat templates; () of other bodies. Refers to the body until it is taken away.
        places: Of all top-level values of `model` so far.
        num_sequences: That an engine runs for the body so far, as `jsonsmall.num_sequences`.
        max_tokens: As `jsonsmall.max_tokens`, so far.
    """

    # Defaults of the class, not of `__init__`: most bodies are read by msgspec and need none.
    num_sequences = 1
    max_tokens: int | None = None
    # Of what the slices had: numbers, and how many prompts, by field.
    _numbers: Mapping[str, Any] = MappingProxyType({})
    _num_prompts: Mapping[bytes, int] = MappingProxyType({})
    _num_items = 0  # of the list that is read
    is_whole = False  # the object has been closed; only white space may follow
    refers_back = False  # the last top-level `previous_response_id` so far is not null
    prompt: tuple[msgspec.Raw, ...] = ()
    fields: Mapping[str, bytes] = MappingProxyType({})
    cuts: tuple[Place, ...] = ()
    cut = ""
    _cut_from = -1  # a member that is being read is to be cut out from here on
    _comma_at = -1  # the comma before it; -1 while no member stays
    _model: object = None
    _adapter = ""
    _num_members = 0
    _key = b""
    _members_at = 0  # behind the opening brace
    _value_at = -1  # where a value of `model` that is no string begins
    _is_inside = False  # of an entered object
    _skipper: StringSkipper | ContainerSkipper
    _behind_skipped: State

    def __init__(
        self,
        needs_places: Callable[[str], bool] | None = None,
        *,
        enters: frozenset[bytes] = frozenset(),
        has_one_prompt: bool = False,
        takes_adapter: bool = False,
        removes: frozenset[str] = frozenset(),
        sessions: SessionSources = NO_SOURCES,
    ) -> None:
        self._sessions = sessions
        self._read = JsonReader._start
        self._needs_places = needs_places
        self._enters = enters
        self._has_one_prompt = has_one_prompt
        self._takes_adapter = takes_adapter
        self._removes = removes
        self.places: list[Place] = []

    @property
    def model(self) -> str | None:
        """The last top-level `model` so far, if it is a string; "" is one. With its adapter."""
        model = self._model if isinstance(self._model, str) else None
        return joined(model, self._adapter) if model and self._adapter else model

    def feed(self, data: bytes | memoryview, at: int = 0) -> int:
        """Read like `IncrementalReader`, but a small whole body at once."""
        if not self._num_read and len(data) <= SMALL_BYTES and self._read_small(bytes(data)):
            return len(data)
        return super().feed(data, at)

    def result(self) -> str:
        """Return the model of a complete body, or raise RequestError (400)."""
        if not self._num_read:
            raise RequestError(rejections.EMPTY_BODY)
        if not self.is_whole:
            raise self._invalid("it ends too early", 0)
        return check_model(self._model if self.model is None else self.model)

    @property
    def pending_at(self) -> int | None:
        """Where an unfinished value of `model` begins, of which a part has been read."""
        is_pending = self._carry and self._read is JsonReader._value and self._key == b"model"
        return self._num_read - len(self._carry) if is_pending else None

    def rewritten(self, data: bytes | memoryview, model: str) -> bytes:
        """Return the whole body with another model at all its places; as its first member, if it
        had none."""
        value = msgspec.json.encode(model)
        if self.places:
            return with_values(data, [(place, value) for place in self.places], self.cuts)
        at = self._members_at
        is_all_cut = bool(self.cuts) and self._comma_at < 0
        is_empty = is_all_cut or data[_behind_all(_SPACE, data, at)] == ord("}")
        member = b'"model":' + value + (b"" if is_empty else b",")
        return with_values(data, [((at, at), member)], self.cuts)

    def without_cuts(self, data: bytes | memoryview) -> bytes:
        """Return the whole body without what is to be cut out."""
        return with_values(data, (), self.cuts)

    def take_prompt(self) -> tuple[msgspec.Raw, ...]:
        """Return `prompt`, and keep it no longer."""
        prompt, self.prompt = self.prompt, ()
        return prompt

    def _read_small(self, data: bytes) -> bool:
        """Read a whole body at once; False where it is to be read in slices."""
        members = read_members(data, self._has_one_prompt, self._sessions.decoders)
        if members is None:
            return False
        found = astuple(members)
        if found[STEERING] != NO_STEERING and self._is_cut(found[STEERING]):
            return False
        self.prompt = found[PROMPT]
        self.num_sequences, self.max_tokens = num_sequences(members), max_tokens(members)
        model, needs_places = members.model, self._needs_places
        if needs_places is not None and needs_places(model or ""):
            places = find_model(data, model)
            if places is None:
                return False
            self._members_at, self.places = places[0], list(places[1])
        self._model = model
        if self._takes_adapter and members.lora_path:
            self._adapter = _adapter_of(members.lora_path)
        if members.previous_response_id is not None:
            self.refers_back = True
        if self._sessions.fields:
            self.fields = self._sessions.fields_of(members)
        self.is_whole = True
        self._num_read = len(data)
        self._read = JsonReader._behind
        return True

    def _is_cut(self, found: tuple[msgspec.Raw, ...]) -> bool:
        present = [name for name, value in zip(FIELDS, found, strict=True) if len(value)]
        return not self._removes.isdisjoint(present)

    # --- states at the top level: each reads from `pos` on and returns how far ------------------

    def _start(self, part: bytes, pos: int) -> int:
        if _BYTE_ORDER_MARK.startswith(part):
            return self._wait(part, pos)
        self._read = JsonReader._opening
        return len(_BYTE_ORDER_MARK) if part.startswith(_BYTE_ORDER_MARK) else pos

    @_after_space
    def _opening(self, part: bytes, pos: int) -> int:
        if part[pos] != ord("{"):
            if part[pos] in b'["-0123456789tfnNI':
                message = "The request body must be a JSON object."
                raise RequestError(Rejection(400, Reason.INVALID_BODY, message))
            raise self._invalid("it must begin with a brace, in UTF-8", pos)
        self._read, self._members_at = JsonReader._first_key, self._begin + pos + 1
        return pos + 1

    @_after_space
    def _first_key(self, part: bytes, pos: int) -> int:
        if part[pos] == ord("}"):
            return self._close(pos)
        self._read = JsonReader._next_key
        return pos

    @_after_space
    def _next_key(self, part: bytes, pos: int) -> int:
        if part[pos] != ord('"'):
            raise self._invalid("a member's name must stand here", pos)
        end = _end_of_string(part, pos, _MAX_KEY_TOKEN_BYTES)
        if end is None:
            return self._wait(part, pos)
        self._num_members += 1
        self.work += _UNITS_PER_MEMBER
        if self._num_members > MAX_MEMBERS:
            message = f"The request body has more than {MAX_MEMBERS} top-level fields."
            raise RequestError(Rejection(400, Reason.INVALID_BODY, message))
        if not end:  # too long for one of ours
            self._key = b""
            return self._begin_skipping(part, pos, JsonReader._colon)
        self._key, self._read = part[pos + 1 : end - 1], JsonReader._colon
        if b"\\" in self._key:
            self._key = self._decoded(part[pos:end], pos).encode("utf-8", "surrogatepass")
        if self._key in _FIELDS and not self._is_inside and self._key.decode() in self._removes:
            self.cut, self._cut_from = self._key.decode(), self._begin + pos
        return end

    @_after_space
    def _colon(self, part: bytes, pos: int) -> int:
        if part[pos] != ord(":"):
            raise self._invalid("a colon must stand here", pos)
        self._read = JsonReader._value
        return pos + 1

    @_after_space
    def _value(self, part: bytes, pos: int) -> int:
        key = self._key
        is_model, is_adapter = key == b"model", self._takes_adapter and key == b"lora_path"
        if (is_model or is_adapter) and part[pos] == ord('"'):
            return self._name(part, pos, is_model=is_model)
        if is_model or is_adapter or key == b"previous_response_id":
            is_null = _is_null(part, pos)
            if is_null is None:
                return self._wait(part, pos)
            if is_model:
                self._model = None if is_null else _NO_STRING
                self._value_at = self._begin + pos
            elif not is_adapter:
                self.refers_back = not is_null
            elif is_null:
                self._adapter = ""
            else:
                raise RequestError(rejections.MANY_ADAPTERS)
        elif (key in _NUMBERS or key in self._sessions.fields) and not self._is_inside:
            return self._short(part, pos)
        elif key in _LISTS and not (self._has_one_prompt or self._is_inside):
            return self._prompts(part, pos)
        elif key in self._enters and part[pos] == ord("{") and not self._is_inside:
            self._is_inside, self._read = True, JsonReader._first_key
            return pos + 1
        return self._begin_skipping(part, pos)

    def _name(self, part: bytes, pos: int, *, is_model: bool) -> int:
        """Read the name of a model, or of the adapter beside it."""
        end = _end_of_string(part, pos, _MAX_MODEL_TOKEN_BYTES)
        if end is None:
            return self._wait(part, pos)
        if not end and is_model:
            self._model, self._value_at = _TOO_LONG, self._begin + pos
            return self._begin_skipping(part, pos)
        if not end:
            raise RequestError(rejections.MANY_ADAPTERS)
        name, self._read = self._decoded(part[pos:end], pos), JsonReader._comma
        if is_model:
            self._model = name
            self.places.append((self._begin + pos, self._begin + end))
        else:
            self._adapter = name
        return end

    @_after_space
    def _comma(self, part: bytes, pos: int) -> int:
        if part[pos] not in b",}":
            raise self._invalid("a comma or the closing brace must stand here", pos)
        is_last = part[pos] == ord("}")
        if not self._is_inside:
            self._end_member(self._begin + pos, is_last=is_last)
        if is_last:
            return self._close(pos)
        self._read = JsonReader._next_key
        return pos + 1

    def _end_member(self, at: int, *, is_last: bool) -> None:
        """Note what is to be cut out of a member that ends here, before a comma or the brace.

        With the comma before it, or the one behind it while no member stays.
        """
        begin, self._cut_from = self._cut_from, -1
        stays = self._comma_at >= 0
        if begin < 0:
            self._comma_at = at
        elif stays:
            self.cuts += ((self._comma_at, at),)
            self._comma_at = at
        else:
            self.cuts += ((begin, at if is_last else at + 1),)

    def _close(self, pos: int) -> int:
        if self._is_inside:
            self._is_inside, self._read = False, JsonReader._comma
            return pos + 1
        self.is_whole = True
        self._read = JsonReader._behind
        return pos + 1

    @_after_space
    def _behind(self, part: bytes, pos: int) -> int:
        raise self._invalid("something follows its closing brace", pos)

    # --- what names the session, and what makes sequences --------------------------------------

    def _short(self, part: bytes, pos: int) -> int:
        """Read a number, or a string that an engine takes for one, or one that may name the
        session; a long one is no such."""
        name = self._sessions.fields.get(self._key)
        most_bytes = MAX_SESSION_BYTES if name else _MAX_NUMBER_BYTES
        if part[pos] == ord('"'):
            end = _end_of_string(part, pos, most_bytes)
        else:
            end = _behind_all(_SCALAR, part, pos)
            if end == len(part):
                end = None if end - pos < most_bytes else 0
        if end is None:
            return self._wait(part, pos)
        if name:
            self.fields = {**self.fields, name: string_of(part[pos:end])}
        else:
            self._numbers = {**self._numbers, self._key.decode(): _whole(part[pos:end])}
            self._weigh()
        if end <= pos:
            return self._begin_skipping(part, pos)
        self._read = JsonReader._comma
        return end

    def _prompts(self, part: bytes, pos: int) -> int:
        """Read what may be a list of prompts."""
        self._num_items = 0
        self._note_prompts()
        if part[pos] != ord("["):
            return self._begin_skipping(part, pos)
        self._read = JsonReader._first_item
        return pos + 1

    @_after_space
    def _first_item(self, part: bytes, pos: int) -> int:
        if part[pos] not in b'"[':  # numbers are one prompt, and objects one chat
            return self._skip_rest(pos)
        self._read = JsonReader._item
        return pos

    @_after_space
    def _item(self, part: bytes, pos: int) -> int:
        is_countable = self._num_items < MAX_SEQUENCES and part[pos] in b'"[{'
        if not is_countable:
            return self._skip_rest(pos)
        self._num_items += 1
        self.work += _UNITS_PER_MEMBER
        return self._begin_skipping(part, pos, JsonReader._behind_item)

    @_after_space
    def _behind_item(self, part: bytes, pos: int) -> int:
        if part[pos] != ord(","):
            return self._skip_rest(pos)
        self._read = JsonReader._item
        return pos + 1

    def _skip_rest(self, pos: int) -> int:
        """Skip the rest of the list, and note how many prompts it had so far."""
        self._note_prompts()
        self._skipper = ContainerSkipper()
        self._read, self._behind_skipped = JsonReader._skip, JsonReader._comma
        return pos

    def _note_prompts(self) -> None:
        self._num_prompts = {**self._num_prompts, self._key: self._num_items}
        self._weigh()

    def _weigh(self) -> None:
        found = Members(**self._numbers)
        num_prompts = max(self._num_prompts.values(), default=1)
        self.num_sequences = sequences(num_prompts, found.n, found.best_of)
        self.max_tokens = max_tokens(found)

    # --- skipping ------------------------------------------------------------------------------

    def _begin_skipping(self, part: bytes, pos: int, then: State | None = None) -> int:
        first = part[pos]
        if first in b'"[{':
            self._skipper = StringSkipper() if first == ord('"') else ContainerSkipper()
            self._read, self._behind_skipped = JsonReader._skip, then or JsonReader._comma
            return pos + 1
        if _behind_all(_SCALAR, part, pos) == pos:
            raise self._invalid("a value must stand here", pos)
        self._read = JsonReader._scalar
        return pos

    def _scalar(self, part: bytes, pos: int) -> int:
        pos = _behind_all(_SCALAR, part, pos)
        if pos < len(part):
            self._read = JsonReader._comma
            self._end_value(pos)
        return pos

    def _skip(self, part: bytes, pos: int) -> int:
        skipper = self._skipper
        before = skipper.work
        pos = skipper.skip(part, pos)
        self.work += skipper.work - before
        if skipper.has_ended:
            self._read = self._behind_skipped
            self._end_value(pos)
        return pos

    def _end_value(self, pos: int) -> None:
        """Note the place of a skipped value of `model`."""
        if self._value_at >= 0:
            self.places.append((self._value_at, self._begin + pos))
            self._value_at = -1

    # --- helpers -------------------------------------------------------------------------------

    def _decoded(self, token: bytes, pos: int) -> str:
        try:
            return str(json.loads(token.decode("utf-8", "surrogatepass")))
        except ValueError:
            error = self._invalid("a string is malformed", pos)
        raise error  # outside of the handler: the parser's error would quote the text

    def _invalid(self, problem: str, pos: int) -> RequestError:
        return RequestError(rejections.invalid_json(problem, self._num_read + pos))


def _adapter_of(value: msgspec.Raw) -> str:
    adapter = msgspec.json.decode(value)
    if adapter is None or isinstance(adapter, str):
        return adapter or ""
    raise RequestError(rejections.MANY_ADAPTERS)


def _behind_all(pattern: re.Pattern[bytes], part: bytes | memoryview, pos: int) -> int:
    found = pattern.match(part, pos)
    return found.end() if found else pos


def _end_of_string(part: bytes, pos: int, max_bytes: int) -> int | None:
    """Return the end of the string at `pos`; 0: longer than `max_bytes`; None: incomplete."""
    token = part[pos + 1 : pos + max_bytes]
    if b"\\" in token:
        token = token.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    found = token.find(b'"')
    if found >= 0:
        return pos + found + 2
    return 0 if len(part) - pos >= max_bytes else None


def _whole(token: bytes) -> int | None:
    try:
        return int(float(json.loads(token)))
    except (ValueError, TypeError, OverflowError):
        return None


def _is_null(part: bytes, pos: int) -> bool | None:
    """Return whether the value at `pos` is null; None: too little of it has come."""
    token = part[pos : pos + 5]
    if token == b"null"[: len(token)]:
        return None
    return token.startswith(b"null") and _behind_all(_SCALAR, token, 4) == 4
