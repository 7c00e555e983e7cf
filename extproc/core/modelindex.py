"""What a model's name means in the whole pool: what most endpoints say that list it.

Each endpoint is believed about itself. A client's request and our own list of models know one
meaning of a name, though, and no endpoint may decide that for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from extproc.core.types import ModelCard

Cards = Mapping[str, ModelCard]
"""What one endpoint lists, by name."""


class ModelIndex:
    """One card for each name that any endpoint lists.

    Attributes:
        by_name: The cards; another object whenever they are not what they were.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, ModelCard] = {}

    def get(self, name: str) -> ModelCard | None:
        """The card of `name`, None where nobody lists it."""
        return self.by_name.get(name)

    def cards(self) -> list[ModelCard]:
        """All of them."""
        return list(self.by_name.values())

    def replace(self, before: Cards, after: Cards, lists: Iterable[Cards | None]) -> None:
        """Take that an endpoint lists `after` instead of `before`.

        Args:
            before: Its last list, empty where there was none.
            after: Its list now, empty where there is none.
            lists: The lists of all endpoints now, this one's included; None for unknown.
        """
        names = [name for name in {**before, **after} if self._may_change(name, before, after)]
        if names:
            told, by_name = [each for each in lists if each is not None], dict(self.by_name)
            for name in names:
                cards = [each[name] for each in told if name in each]
                if cards:
                    by_name[name] = agreed(cards)
                else:
                    by_name.pop(name, None)
            self.by_name = by_name

    def _may_change(self, name: str, before: Cards, after: Cards) -> bool:
        """Not by one more of the same mind, as when pods that list the same come one by one."""
        old, new, card = before.get(name), after.get(name), self.by_name.get(name)
        if old == new:
            return False
        return old is not None or new is None or card is None or _said(card) != _said(new)


def agreed(cards: Sequence[ModelCard]) -> ModelCard:
    """The card that most of these show; where as many say so, that of an adapter.

    An adapter taken for a base model loses what routing does for it; the reverse costs little.
    """
    if len(cards) == 1:
        return cards[0]
    num_adapters = sum(card.parent is not None for card in cards)
    is_adapter = 2 * num_adapters >= len(cards)
    agreeing = [card for card in cards if (card.parent is not None) is is_adapter]
    [(most, _)] = Counter(map(_said, agreeing)).most_common(1)
    return next(card for card in agreeing if _said(card) == most)


def _said(card: ModelCard) -> tuple[object, ...]:
    """All but the time, which is the endpoint's."""
    return card.parent, card.root, card.max_model_len, card.owned_by
