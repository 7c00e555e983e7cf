"""The models that one endpoint lists, and those for which it takes requests."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from extproc.pods.modelindex import NOTHING, Listing
from extproc.pods.podrow import PodRow
from extproc.types import ModelCard, RequestInfo

MAX_SILENCES = 3
"""Failed listings after which an endpoint with load reports is no longer waited for."""


class ListedModels:
    """The models of one endpoint.

    Attributes:
        models: That it lists; None for unknown.
        registered: The names of those, and of what it finds by itself, but for those about which it
            is `disbelieved`.
        listed_at_s: When its last list was asked for.
    """

    def __init__(self, row: PodRow) -> None:
        self._row = row
        self.models: Listing | None = None
        self.registered: frozenset[str] | None = None
        self._declared: Mapping[str, ModelCard] = {}
        self._is_resolver = False
        self.disbelieved: set[str] = set()
        self.listed_at_s = -inf
        self._is_waited_for = True
        self._num_silences = 0

    def configure(self, *, is_resolver: bool) -> None:
        """Apply whether it finds by itself the adapters that are declared."""
        self._is_resolver = is_resolver
        self._register()

    def declare(self, declared: Mapping[str, ModelCard]) -> None:
        """Replace those adapters."""
        if self._declared is not declared:
            self._declared = declared
            self._register()

    def replace(self, models: Listing | None) -> None:
        """Replace the models that it lists."""
        self.models = models
        self._register()

    def answered(self, asked_at_s: float) -> None:
        """Record that it listed them."""
        self._num_silences, self.listed_at_s = 0, asked_at_s

    def was_silent(self) -> None:
        """Record that it failed to list them."""
        if self.models is None:
            self._num_silences += 1

    def forget(self, *, is_waited_for: bool) -> None:
        """Have none: its process restarted, and is waited for or not."""
        self._is_waited_for, self._num_silences = is_waited_for, 0
        self.replace(None)

    def is_owing(self, *, is_known: bool) -> bool:
        """Return whether its models are still to be listed: new or restarted, not just silent."""
        if self.models is not None or not self._is_waited_for:
            return False
        return self._num_silences < (MAX_SILENCES if is_known else 1)

    def disbelieve(self, model: str) -> None:
        """Take it for one that does not list a model."""
        self.disbelieved.add(model)
        self._register()

    def believe(self, model: str) -> None:
        """Believe its list about a model again."""
        self.disbelieved.discard(model)
        self._register()

    def card_of(self, name: str | None) -> ModelCard | None:
        """Return the model that it has under a name, or finds by itself; None for neither."""
        if self.registered is None or name is None or name not in self.registered:
            return None
        return (self.models or NOTHING).get(name) or self._declared.get(name)

    def adapter_of(self, request: RequestInfo) -> str | None:
        """Return the adapter that a request is for here, by the endpoint's list if it has the
        name."""
        card = self.card_of(request.model)
        if card is None:
            return request.adapter
        return None if card.parent is None else card.id

    def _register(self) -> None:
        """Find the names that it takes requests for."""
        models = self.models
        names = None if models is None else models.names
        if models is not None and names is not None and self._is_resolver:
            found = (c for c in self._declared.values() if not c.parent or c.parent in models)
            names = names.union(card.id for card in found)
        if names is not None and self.disbelieved:
            names -= self.disbelieved
        self.registered = names
        self._row.renew()
