"""An endpoint's list at `/v1/models`: base models, and adapters, which have a parent (vLLM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 200
_T = TypeVar("_T")


class ListingError(Exception):
    """An endpoint cannot be used; the message says why, in one line."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class Listing(msgspec.Struct):
    """The endpoint's response, in its order."""

    data: list[_Card]

    @property
    def bases(self) -> Sequence[str]:
        """The base models."""
        return tuple(card.id for card in self.data if not card.parent)

    @property
    def adapters(self) -> Sequence[str]:
        """The adapters; where none has a parent, all models."""
        return tuple(card.id for card in self.data if card.parent) or self.bases

    @property
    def base(self) -> str:
        """The base model listed first; where there is none, the first adapter.

        Raises:
            IndexError: Nothing is listed.
        """
        return (self.bases or self.adapters)[0]


def base_url(text: str) -> str:
    """Return a base URL without a trailing slash; `/v1` at its end may be left out.

    Raises:
        ListingError: It is not the URL of a server.
    """
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ListingError(f"{text}: {error}") from error
    if not is_valid:
        raise ListingError(f"{text!r} is not an http:// or https:// URL")
    return text.rstrip("/").removesuffix("/v1")


async def fetch_listing(url: str, headers: Mapping[str, str]) -> Listing:
    """Return the list of models of an endpoint, at least one.

    Raises:
        ListingError: There is none.
    """
    listing = await fetch_json(f"{url}/v1/models", Listing, headers)
    if not listing.data:
        raise ListingError(f"{url}/v1/models lists nothing")
    return listing


async def fetch_json(
    url: str, kind: type[_T], headers: Mapping[str, str], timeout_s: float = _TIMEOUT_S
) -> _T:
    """GET a JSON document.

    Raises:
        ListingError: There is none, or it is something else.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            body = await response.read()
            if response.status != 200:
                text = " ".join(body[:_MAX_ERROR_BYTES].decode(errors="replace").split())
                raise ListingError(f"{url}: status {response.status} {text}".rstrip())
            return msgspec.json.decode(body, type=kind)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError) as error:
        raise ListingError(f"{url}: {str(error) or f'no response in {timeout_s:g} s'}") from error
