"""One meaning of each model's name for the whole pool: that of most endpoints that list it.

Each endpoint is believed about itself. In a client's request and in our own list of models a name
has only one meaning, though, and no endpoint may decide that for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from extproc.types import ModelCard

Cards = Mapping[str, ModelCard]
"""The models that one endpoint lists, by name."""


class ModelIndex:
    """One card for each name that any endpoint lists.

    Attributes:
        by_name: The cards; replaced by a new object on change.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, ModelCard] = {}
        self._num_lists: dict[str, int] = {}  # how many endpoints list each name

    def replace(self, before: Cards, after: Cards, lists: Iterable[Cards | None]) -> None:
        """Record that an endpoint lists `after` instead of `before`. O(names of both).

        Args:
            before: Its last list, empty where there was none.
            after: Its list now, empty where there is none.
            lists: The lists of all endpoints now, this one's included; None for unknown. Read
                only for names that several endpoints list.
        """
        by_name, num_lists = dict(self.by_name), self._num_lists
        contested, is_changed = [], False
        for name in before.keys() - after.keys():
            num_lists[name] -= 1
            if num_lists[name]:
                contested.append(name)
            else:
                del num_lists[name], by_name[name]
                is_changed = True
        for name, card in after.items():
            old, known = before.get(name), by_name.get(name)
            if old is None:
                num_lists[name] = num_lists.get(name, 0) + 1
            if known is None:
                by_name[name] = card
                is_changed = True
            elif old is not card and (old is not None or _content(known) != _content(card)):
                # One more that agrees changes nothing: pods that list the same come in turn.
                contested.append(name)
        known_lists = [each for each in lists if each is not None] if contested else []
        for name in contested:
            cards = [each[name] for each in known_lists if name in each]
            if cards:  # else others that list it are leaving too, and will be removed
                by_name[name] = majority_card(cards)
        if contested or is_changed:
            self.by_name = by_name


def majority_card(cards: Sequence[ModelCard]) -> ModelCard:
    """Return the card that most of these show; in a tie, that of an adapter.

    An adapter mistaken for a base model loses its affinity; the reverse costs little.
    """
    if len(cards) == 1:
        return cards[0]
    num_adapters = sum(card.parent is not None for card in cards)
    is_adapter = 2 * num_adapters >= len(cards)
    agreeing = [card for card in cards if (card.parent is not None) is is_adapter]
    [(most, _)] = Counter(map(_content, agreeing)).most_common(1)
    return next(card for card in agreeing if _content(card) == most)


def _content(card: ModelCard) -> tuple[object, ...]:
    """Return all but the time, which is the endpoint's."""
    return card.parent, card.root, card.max_model_len, card.owned_by


def card_to_keep(before: ModelCard | None, now: ModelCard) -> ModelCard:
    """Return the card to keep: vLLM's `created` is the time of its response, not the model's."""
    if before is None or (before.parent, before.root) != (now.parent, now.root):
        return now
    return before
