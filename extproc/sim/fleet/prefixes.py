"""What a router can see of a prompt's beginning: hashes of its body, KiB by KiB."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.workload.requests import Arrival

BODY_BYTES_PER_TOKEN = 4
"""English text in the tokenizers of current models (platform.openai.com/tokenizer)."""
BLOCK_BYTES = 1024


def prefix_hashes(arrival: Arrival, request_id: str) -> tuple[int, ...]:
    """Return `RequestInfo.prefix_hashes` of a request.

    A block that the shared beginning does not fill is the request's own, as are all after it.
    """
    num_shared = arrival.prefix_tokens * BODY_BYTES_PER_TOKEN // BLOCK_BYTES
    num_blocks = arrival.prompt_tokens * BODY_BYTES_PER_TOKEN // BLOCK_BYTES
    digest = (arrival.adapter or "").encode()
    hashes = []
    for block in range(num_blocks):
        content = arrival.prefix if block < num_shared else request_id
        digest = blake2b(digest + content.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest))
    return tuple(hashes)
