"""An endpoint's list at `/v1/models`: base models, and adapters, which have a parent (vLLM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from extproc.files.refusals import tls_failure
from extproc.files.tls import SYSTEM_TRUST, system_context
from extproc.reports.listings import ModelsError, decode_models
from extproc.types import ModelCard

_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 200


class TargetError(Exception):
    """A target cannot be used, or not any more; the message says which and why."""


@dataclass(frozen=True, slots=True)
class EndpointModels:
    """The models of an endpoint, in its order; at least one."""

    cards: Sequence[ModelCard]

    @property
    def bases(self) -> Sequence[str]:
        """The base models."""
        return tuple(card.id for card in self.cards if not card.parent)

    @property
    def adapters(self) -> Sequence[str]:
        """The adapters; where none has a parent, all models."""
        return tuple(card.id for card in self.cards if card.parent) or self.bases

    @property
    def base(self) -> str:
        """The base model listed first; where there is none, the first adapter."""
        return (self.bases or self.adapters)[0]


def base_url(text: str) -> str:
    """Return a base URL without a trailing slash; `/v1` at its end may be left out.

    Raises:
        TargetError: It is not the URL of a server.
    """
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise TargetError(f"{text}: {error}") from error
    if not is_valid:
        raise TargetError(f"{text!r} is not an http:// or https:// URL")
    return text.rstrip("/").removesuffix("/v1")


async def fetch_listing(
    url: str, headers: Mapping[str, str], timeout_s: float = _TIMEOUT_S
) -> EndpointModels:
    """Return the list of models of an endpoint, at least one.

    Raises:
        TargetError: There is none.
    """
    page, timeout = f"{url}/v1/models", aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=system_context()),
                headers=headers,
                timeout=timeout,
            ) as session,
            session.get(page, allow_redirects=False) as response,
        ):
            body = await response.read()
            if response.status != 200:
                text = " ".join(body[:_MAX_ERROR_BYTES].decode(errors="replace").split())
                raise TargetError(f"{page}: status {response.status} {text}".rstrip())
            cards = decode_models(body)
    except (aiohttp.ClientError, TimeoutError, ModelsError, ValueError) as error:
        why = tls_failure(error, trust=SYSTEM_TRUST) or str(error)
        raise TargetError(f"{page}: {why or f'no response in {timeout_s:g} s'}") from error
    if not cards:
        raise TargetError(f"{page} lists nothing")
    return EndpointModels(cards)
