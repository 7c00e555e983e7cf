"""What a router can see of a prompt's beginning: hashes, of as many bytes as in production."""

from __future__ import annotations

from bisect import bisect_right
from hashlib import blake2b
from typing import TYPE_CHECKING

from extproc.fleet.prefixes import MARKS_BYTES

if TYPE_CHECKING:
    from extproc.lab.workload.requests import Arrival

BODY_BYTES_PER_TOKEN = 4
"""English text in the tokenizers of current models (platform.openai.com/tokenizer)."""


def prefix_hashes(arrival: Arrival, request_id: str) -> tuple[int, ...]:
    """Return `RequestInfo.prefix_hashes` of a request.

    All that the shared beginning does not contain is the request's own.
    """
    shared_bytes = arrival.prefix_tokens * BODY_BYTES_PER_TOKEN
    prompt_bytes = arrival.prompt_tokens * BODY_BYTES_PER_TOKEN
    digest = (arrival.adapter or "").encode()
    hashes = []
    for mark in MARKS_BYTES[: bisect_right(MARKS_BYTES, prompt_bytes)]:
        content = arrival.prefix if mark <= shared_bytes else request_id
        digest = blake2b(digest + content.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest))
    return tuple(hashes)
