"""One meaning of each model's name for the whole pool: that of most endpoints that list it.

Each endpoint is believed about itself. In a client's request and in our own list of models a name
has only one meaning, though. No endpoint may decide that for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf

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
        bases: Those of its base models.
    """

    __slots__ = ("bases", "names")

    def __init__(self, cards: Mapping[str, ModelCard], names: frozenset[str]) -> None:
        super().__init__(cards)
        self.names = names
        self.bases = frozenset([name for name, card in cards.items() if card.parent is None])


NOTHING = Listing({}, frozenset())


class _Meaning(Struct, gc=False):
    """The models of some endpoints under a name."""

    card: ModelCard
    num_endpoints: int = 0


_Held = _Meaning | dict[_Content, _Meaning]
"""The meanings of a name. Most have one, which is held without a dictionary: with it each of the
names that endpoints invent would take 350 bytes more."""


class ModelIndex:
    """One card for each name that any endpoint lists.

    Attributes:
        by_name: The cards; replaced by a new object on change.
        doubted: Cards of base models that as many endpoints list as adapters; likewise.
        bases_first: The cards by name, those of `doubted` before others; likewise.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, ModelCard] = {}
        self.doubted: Mapping[str, ModelCard] = {}
        self.bases_first: Mapping[str, ModelCard] = self.by_name
        self._meanings: dict[str, _Held] = {}
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
        held, content = self._meanings.get(now.id), _content(now)
        if isinstance(held, _Meaning):
            return held.card if _content(held.card) == content else now
        meaning = held and held.get(content)
        return meaning.card if meaning else now

    def replace(self, before: Listing, after: Listing) -> None:
        """Record that an endpoint lists `after` instead of `before`. O(names of both).

        Args:
            before: Its last list, empty where there was none.
            after: Its list now, as `listing` returned it; empty where there is none.
        """
        by_name, is_changed = dict(self.by_name), False
        doubted, all_meanings = dict(self.doubted), self._meanings
        for name, card, old in _changes(before, after):
            held = all_meanings.get(name)
            # Most names that come or go are of one endpoint: this takes a third of the time.
            if held is None and card is not None:
                all_meanings[name], by_name[name] = _Meaning(card, 1), card
                is_changed = True
                continue
            if card is None and isinstance(held, _Meaning) and held.num_endpoints == 1:
                del all_meanings[name], by_name[name]
                is_changed = True
                continue
            meanings = _by_content(held)
            if card is not None:
                meanings.setdefault(_content(card), _Meaning(card)).num_endpoints += 1
            if old is not None:
                _leave(meanings, old)
            doubted.pop(name, None)
            if len(meanings) > 1 and (base := doubted_base(meanings.values())) is not None:
                doubted[name] = base
            all_meanings[name] = meanings if len(meanings) > 1 else next(iter(meanings.values()))
            if by_name.get(name) is not (most := majority_card(meanings.values())):
                by_name[name] = most
                is_changed = True
        if doubted != self.doubted:
            self.doubted = doubted
        elif not is_changed:
            return
        if is_changed:
            self.by_name = by_name
        self.bases_first = {**self.by_name, **doubted} if doubted else self.by_name


def _changes(
    before: Listing, after: Listing
) -> Iterator[tuple[str, ModelCard | None, ModelCard | None]]:
    """Yield each name that an endpoint lists otherwise: its card now, and its card before."""
    for name, old in before.items():
        if (card := after.get(name)) is not old:
            yield name, card, old
    for name, card in after.items():
        if name not in before:
            yield name, card, None


def _by_content(held: _Held | None) -> dict[_Content, _Meaning]:
    if isinstance(held, _Meaning):
        return {_content(held.card): held}
    return {} if held is None else held


def _leave(meanings: dict[_Content, _Meaning], card: ModelCard) -> None:
    content = _content(card)
    meanings[content].num_endpoints -= 1
    if not meanings[content].num_endpoints:
        del meanings[content]


def majority_card(meanings: Collection[_Meaning]) -> ModelCard:
    """Return the card that most show; in a tie, that of an adapter, and of those the one with the
    longest context, and then the first shown.

    An adapter mistaken for a base model loses its affinity; the reverse costs little, but where
    undeclared adapters get no requests (`doubted_base`). A context that is too short would hide how
    long prompts are from the choice among all endpoints.
    """
    if len(meanings) > 1:
        num_adapters = sum(each.num_endpoints for each in meanings if each.card.parent is not None)
        is_adapter = 2 * num_adapters >= sum(each.num_endpoints for each in meanings)
        meanings = [each for each in meanings if (each.card.parent is not None) is is_adapter]
    return max(meanings, key=_weight).card


def doubted_base(meanings: Collection[_Meaning]) -> ModelCard | None:
    """Return the card of a base model that exactly as many list as an adapter, if it is one."""
    bases = [each for each in meanings if each.card.parent is None]
    num_bases = sum([each.num_endpoints for each in bases])
    if not bases or 2 * num_bases != sum([each.num_endpoints for each in meanings]):
        return None
    return max(bases, key=_weight).card


def _weight(meaning: _Meaning) -> tuple[int, float]:
    length = meaning.card.max_model_len
    return meaning.num_endpoints, inf if length is None else length


def _content(card: ModelCard) -> _Content:
    """Return all but the time, which is the endpoint's."""
    return card.parent, card.root, card.max_model_len, card.owned_by
