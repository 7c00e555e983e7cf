"""Small whole JSON bodies, read in one pass by msgspec, which checks all of each.

A body of 308 B takes 31 thousand instructions so, and 359 slice by slice.

Bodies that msgspec refuses but Python may accept are left to `jsonmodel`, which reads slice by
slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from extproc.bounds import MAX_SEQUENCES
from extproc.errors import RequestError
from extproc.rejections import invalid_json
from extproc.request.bodyslices import Place
from extproc.request.steering import FIELDS

SMALL_BYTES = 256 * 1024
"""Largest body that msgspec reads, in one pass: 0.8 ms of the densest text, 0.1 of prompts."""

_POSITION = re.compile(r" ?\(byte (\d+)\)$")
_VALUE = re.compile(rb'[ \t\n\r]*:[ \t\n\r]*("(?:[^"\\]|\\.)*")')
_BRACE = ord("}")
_NOTHING = msgspec.Raw()


class Members(msgspec.Struct, gc=False):
    """Narrow types, so that decoding stops at the first byte of a huge list for a name; then the
    prompt's parts as they stand in the body. Decoders add `steering.FIELDS`."""

    model: str | None = None
    previous_response_id: str | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    lora_path: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING


class AllMembers(Members, gc=False):
    """With further lists of prompts, which no chat has."""

    prompt_embeds: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    queries: msgspec.Raw = _NOTHING
    items: msgspec.Raw = _NOTHING
    text_1: msgspec.Raw = _NOTHING
    text_2: msgspec.Raw = _NOTHING


PROMPT = slice(8, 15)
_LISTS = slice(15, 21)
"""Of the fields of `AllMembers`."""
STEERING = slice(-len(FIELDS), None)
"""Of the fields of what is decoded."""
NO_STEERING = (_NOTHING,) * len(FIELDS)
LISTS = ("messages", "prompt", "input", *AllMembers.__struct_fields__[_LISTS])
"""Fields that may have a list of prompts: of completions, embeddings, a batch of chats, scores."""
NUMBERS = Members.__struct_fields__[2:7]
_MANY = re.compile(rb'\[[ \t\n\r]*["[]')
"""Begins a list of prompts. A list of numbers is one prompt, and so is one of objects: a chat."""

Decoders = tuple[Callable[[bytes | memoryview], Any], ...]
"""Of any body, and of one that has one prompt: each to `Members`."""


def decoders(fields: Iterable[str] = ()) -> Decoders:
    """Return decoders of bodies whose members are to have these further fields, as written."""
    further = [(name, msgspec.Raw, _NOTHING) for name in (*fields, *FIELDS)]
    kinds = [
        msgspec.defstruct("Fields", further, bases=(kind,), gc=False)
        for kind in (AllMembers, Members)
    ]
    return tuple([msgspec.json.Decoder(kind).decode for kind in kinds])


_DECODERS = decoders()
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def is_cut_off(data: bytes) -> bool:
    """Return whether so much of a small body is fine as far as it goes, and its end is missing."""
    try:
        _DECODERS[0](data)
    except msgspec.DecodeError as error:
        return str(error) == "Input data was truncated"
    except (ValueError, RecursionError):
        return False
    return False


def read_members(
    data: bytes | memoryview, has_one_prompt: bool = False, decoders: Decoders = _DECODERS
) -> Members | None:
    """Return what a body has, or None where Python may read it otherwise.

    Args:
        has_one_prompt: Its path takes no more, so that `Members` are enough.

    Raises:
        RequestError: 400, Python would refuse it as well.
    """
    if not data or (data[-1] != _BRACE and data[-2:] != b"}\n"):
        return None
    try:
        members: Members = decoders[has_one_prompt](data)
        return members
    except msgspec.ValidationError:  # another type: the last one may be a string
        return None
    except msgspec.DecodeError as error:
        _refuse_if_sure(data, str(error))
        return None
    except (ValueError, RecursionError):
        return None


def num_sequences(members: Members) -> int:
    """Return how many sequences the engine runs for a body: answers to each prompt, times prompts.
    `Members` have one prompt.

    At least 1 and at most `MAX_SEQUENCES`, also for a body that the engine will refuse.
    """
    num_prompts = 1
    if isinstance(members, AllMembers):
        for each in (members.messages, members.prompt, members.input, *astuple(members)[_LISTS]):
            if each is not _NOTHING and _MANY.match(each) is not None:
                num_prompts = max(num_prompts, len(_decode_list(each)))
    if num_prompts == 1 and members.n is members.best_of is None:
        return 1
    return sequences(num_prompts, members.n, members.best_of)


def sequences(num_prompts: int, n: int | None, best_of: int | None) -> int:
    """Return the same of so many prompts, and these fields."""
    return min(MAX_SEQUENCES, max(1, num_prompts) * max(1, n or 1, best_of or 1))


def max_tokens(members: Members) -> int | None:
    """Return the most tokens of an answer by a body, None where it says nothing."""
    return members.max_completion_tokens or members.max_tokens or members.max_output_tokens


def find_model(data: bytes, model: str | None) -> tuple[int, Sequence[Place]] | None:
    """Return where a legal body's members begin, and the place of its only `model`, or of none.

    None where that is not sure. Only escapes of this form can spell its letters otherwise.
    """
    has_escapes = b"\\" in data and b"\\u00" in data  # one byte is found 50 times as fast
    num_keys = 2 if has_escapes else data.count(b'"model"')
    if num_keys > 1 or (num_keys and model is None):
        return None
    members_at = data.index(b"{") + 1
    if not num_keys:
        return members_at, ()
    found = _VALUE.match(data, data.index(b'"model"') + len(b'"model"'))
    assert found is not None
    return members_at, (found.span(1),)


def _refuse_if_sure(data: bytes | memoryview, problem: str) -> None:
    """Refuse a body that msgspec could not read, unless Python may accept it.

    Python accepts more in three cases only: NaN and Infinity, lone surrogates, and a byte order
    mark. Where msgspec does not report the position, all are possible.
    """
    found = _POSITION.search(problem)
    if found is None:
        return
    place = int(found[1])
    is_number = data[place : place + 1] in (b"N", b"I")
    may_be_legal = is_number or not place or b"\\u" in bytes(data[max(0, place - 12) : place])
    if not may_be_legal:
        what = problem[: found.start()].rpartition(": ")[2].rstrip()
        raise RequestError(invalid_json(what, place))
