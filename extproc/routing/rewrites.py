"""The name that a pod reads in `model`, where a client wrote another: aliases, canaries, versions.

1. A rule with the name that the client wrote counts before a generic one, and among equals the
   first.
2. A rule's targets are final: no other rule is asked about them.
3. Without a rule, a request's own header counts, as far as it is trusted.
4. The version of an adapter comes last, when its pod is chosen: the name that the pod lists.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from random import Random

from msgspec import Struct

from extproc.openai import LISTED, Spelling


class Rule(Struct, frozen=True):
    """The targets of some models.

    Attributes:
        models: Names that clients write; () for a generic rule: any name, and bodies without a
            `model`.
        targets: Names that pods know, each with its share of the requests. If none has one, all are
            equal; if some do, a target without gets nothing.
    """

    name: str
    models: tuple[str, ...]
    targets: tuple[tuple[str, float | None], ...]

    def shares(self) -> list[tuple[str, float]]:
        """Return the targets that get requests, with their weights."""
        if all(weight is None for _, weight in self.targets):
            return [(target, 1.0) for target, _ in self.targets]
        return [(target, weight) for target, weight in self.targets if weight]


class _Draw(Struct, frozen=True):
    targets: tuple[str, ...]
    limits: tuple[float, ...]  # of the targets' weights, added up


class Rewrites:
    """The rules in force.

    Args:
        rng: Chooses among a rule's targets.

    Attributes:
        spelling: How clients and pods write the names that pods list.
    """

    def __init__(
        self, rules: Sequence[Rule] = (), *, rng: Random, spelling: Spelling = LISTED
    ) -> None:
        self.spelling = spelling
        self._rng = rng
        self._declared: Collection[str] = ()
        self.configure(rules)

    def configure(self, rules: Sequence[Rule]) -> None:
        """Replace the rules, in the order of their precedence."""
        self._exact: dict[str, _Draw] = {}
        self._generic: _Draw | None = None
        for rule in rules:
            shares = rule.shares()
            if not shares:
                continue
            draw = _Draw(
                tuple(target for target, _ in shares),
                tuple(accumulate(weight for _, weight in shares)),
            )
            for model in rule.models:
                self._exact.setdefault(model, draw)
            if not rule.models and self._generic is None:
                self._generic = draw

    def declare(self, names: Collection[str]) -> None:
        """Replace the adapters that pods may have under another name, known once one is picked."""
        self._declared = names

    def is_active(self) -> bool:
        """Return whether a request without a header of its own may be rewritten."""
        has_rules = bool(self._exact) or self._generic is not None
        return has_rules or bool(self._declared) or self.spelling.joins

    def is_declared(self, model: str) -> bool:
        """Return whether pods may have a model under another name."""
        return model in self._declared

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """The models that rules name, each with the names that pods read instead."""
        return {model: draw.targets for model, draw in self._exact.items()}

    def concerns(self, model: str) -> bool:
        """Return whether a pod may read another name than this, "" for none, for a request without
        a header."""
        listed = self.spelling.listed(model)
        if listed in self._exact or self._generic is not None or listed in self._declared:
            return True
        return self.spelling.full(listed) != model

    def target(self, model: str, hinted: str = "") -> str:
        """Return the name for the pod; to be asked once for each request, as it may be drawn.

        Args:
            model: The client's name; "" for a body without a model.
            hinted: By its header; "" for none.

        Returns:
            "" if neither the client nor a rule nor the header names a model.
        """
        draw = self._exact.get(model, self._generic)
        if draw is None:
            return hinted or model
        if len(draw.targets) == 1:
            return draw.targets[0]
        return self._rng.choices(draw.targets, cum_weights=draw.limits)[0]
