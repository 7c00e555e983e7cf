"""What an endpoint lists at `/v1/models`: base models, and adapters, which have a parent (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class Listing(msgspec.Struct):
    """The endpoint's answer.

    Attributes:
        data: Its models, in its order.
    """

    data: list[_Card]

    @property
    def bases(self) -> Sequence[str]:
        """Those that are nobody's adapter."""
        return tuple(card.id for card in self.data if not card.parent)

    @property
    def adapters(self) -> Sequence[str]:
        """Those with a parent; where none has one, all of them."""
        return tuple(card.id for card in self.data if card.parent) or self.bases

    @property
    def base(self) -> str:
        """The base model listed first; where there is none, the first adapter.

        Raises:
            IndexError: Nothing is listed.
        """
        return (self.bases or self.adapters)[0]
