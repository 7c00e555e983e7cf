"""One meaning of each model's name for the whole pool: that of most endpoints that list it.

Each endpoint is believed about itself. In a client's request and in our own list of models a name
has only one meaning, though. No endpoint may decide that for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from extproc.types import ModelCard

_MAX_RECENT = 4
"""Lists of names that later lists are compared with: while an adapter comes or goes, there are
two.
"""
_Content = tuple[object, ...]


class Listing(dict[str, ModelCard]):
    """The models that an endpoint lists, by name, in its order; not to be changed.

    Attributes:
        names: Of the models; one object for endpoints that list the same.
    """

    __slots__ = ("names",)

    def __init__(self, cards: Mapping[str, ModelCard], names: frozenset[str]) -> None:
        super().__init__(cards)
        self.names = names


NOTHING = Listing({}, frozenset())


class _Meaning(Struct):
    """The models of some endpoints under a name."""

    card: ModelCard
    num_endpoints: int = 0


class ModelIndex:
    """One card for each name that any endpoint lists.

    Attributes:
        by_name: The cards; replaced by a new object on change.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, ModelCard] = {}
        self._meanings: dict[str, dict[_Content, _Meaning]] = {}
        self._recent: deque[frozenset[str]] = deque(maxlen=_MAX_RECENT)

    def listing(self, cards: Iterable[ModelCard], before: Listing) -> Listing:
        """Return what to keep of the cards that an endpoint lists now, instead of those before.

        vLLM's `created` is the time of its response, not the model's, so it does not count. Cards
        that endpoints agree on are one object: a hundred endpoints have a hundred thousand cards
        and names.
        """
        kept = [self._card_to_keep(before.get(card.id), card) for card in cards]
        models = {card.id: card for card in kept}
        names = frozenset(models)
        for known in (before.names, *self._recent):
            if known == names:
                return Listing(models, known)
        self._recent.append(names)
        return Listing(models, names)

    def _card_to_keep(self, before: ModelCard | None, now: ModelCard) -> ModelCard:
        if before is not None and (before.parent, before.root) == (now.parent, now.root):
            return before
        meaning = self._meanings.get(now.id, {}).get(_content(now))
        return now if meaning is None else meaning.card

    def replace(self, before: Listing, after: Listing) -> None:
        """Record that an endpoint lists `after` instead of `before`. O(names of both).

        Args:
            before: Its last list, empty where there was none.
            after: Its list now, as `listing` returned it; empty where there is none.
        """
        by_name, is_changed = dict(self.by_name), False
        for name in {**before, **after}:
            old, card = before.get(name), after.get(name)
            if old is card:
                continue
            meanings = self._meanings.setdefault(name, {})
            if card is not None:
                meanings.setdefault(_content(card), _Meaning(card)).num_endpoints += 1
            if old is not None:
                _leave(meanings, old)
            if not meanings:
                del self._meanings[name], by_name[name]
                is_changed = True
            elif by_name.get(name) is not (most := majority_card(meanings.values())):
                by_name[name] = most
                is_changed = True
        if is_changed:
            self.by_name = by_name


def _leave(meanings: dict[_Content, _Meaning], card: ModelCard) -> None:
    content = _content(card)
    meanings[content].num_endpoints -= 1
    if not meanings[content].num_endpoints:
        del meanings[content]


def majority_card(meanings: Collection[_Meaning]) -> ModelCard:
    """Return the card that most show; in a tie, that of an adapter, and of those the first shown.

    An adapter mistaken for a base model loses its affinity; the reverse costs little.
    """
    if len(meanings) > 1:
        num_adapters = sum(each.num_endpoints for each in meanings if each.card.parent is not None)
        is_adapter = 2 * num_adapters >= sum(each.num_endpoints for each in meanings)
        meanings = [each for each in meanings if (each.card.parent is not None) is is_adapter]
    return max(meanings, key=lambda each: each.num_endpoints).card


def _content(card: ModelCard) -> _Content:
    """Return all but the time, which is the endpoint's."""
    return card.parent, card.root, card.max_model_len, card.owned_by
