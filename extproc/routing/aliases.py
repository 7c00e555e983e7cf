"""Names that rules rewrite, shown as models: clients look for the name that they are to write.

An alias is there where one of its targets is, and has the card of the first that is; its `root` is
that target's name. A name that pods or declarations have is theirs, not an alias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from extproc.types import ModelCard

_Registry = Mapping[str, ModelCard]


class Aliases:
    """The names of the rules in force, each with the names that pods read instead."""

    def __init__(self) -> None:
        self._targets: Mapping[str, Sequence[str]] = {}
        self._names = frozenset[str]()
        self._added: tuple[_Registry, _Registry] = ({}, {})

    def configure(self, targets: Mapping[str, Sequence[str]]) -> None:
        """Replace the names."""
        self._targets = targets
        self._added = ({}, {})

    def add(
        self, registry: _Registry, lists: Sequence[frozenset[str]]
    ) -> tuple[_Registry, list[frozenset[str]]]:
        """Return the cards and the lists of names with the aliases of what is in both.

        The same objects as long as nothing changes.
        """
        names = frozenset(
            name
            for name, targets in self._targets.items()
            if any(target in each for each in lists for target in targets if target in registry)
        )
        if names != self._names:
            self._names = names
        if not names:
            return registry, [*lists]
        if self._added[0] is not registry:
            found = ((name, self.find(name, registry.get)) for name in self._targets)
            cards = {name: replace(card, id=name, root=card.id) for name, card in found if card}
            self._added = registry, {**cards, **registry}
        return self._added[1], [*lists, self._names]

    def find(self, name: str, known: Callable[[str], ModelCard | None]) -> ModelCard | None:
        """Return the card of the first target that is known."""
        cards = (known(target) for target in self._targets.get(name, ()))
        return next((card for card in cards if card is not None), None)
