"""The name that a pod reads in `model`, where a client wrote another: aliases, canaries, versions.

1. A rule with the name that the client wrote counts before a generic one, and among equals the
   first.
2. A rule's targets are final: no other rule is asked about them.
3. Without a rule, a request's own header counts, as far as it is trusted.
4. The version of an adapter comes last, when its pod is chosen: the name that the pod lists.
5. A target that does worse than another one may be taken back (`routing.canaries`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, count
from random import Random
from typing import NamedTuple

from msgspec import Struct

from extproc.meters import Meters
from extproc.openai import LISTED, Spelling
from extproc.phrases import listed
from extproc.pods.completion import Ended
from extproc.routing.canaries import ERROR_RATE, Canaries


class Rule(Struct, frozen=True):
    """The targets of some models.

    Attributes:
        name: The name by which people know it: a route's, or that of the object that has it.
        models: Names that clients write; () for a generic rule: any name, and bodies without a
            `model`.
        targets: Names that pods know, each with its share of the requests. If none has one, all are
            equal; if some do, a target without gets nothing.
    """

    name: str
    models: tuple[str, ...]
    targets: tuple[tuple[str, float | None], ...]

    def shares(self) -> dict[str, float]:
        """Return the targets that get requests, with their weights."""
        is_equal = all(weight is None for _, weight in self.targets)
        shares: dict[str, float] = {}
        for target, weight in self.targets:
            if is_equal or weight:
                shares[target] = shares.get(target, 0.0) + (weight or 1.0)
        return shares


class Drawn(NamedTuple):
    """The target of a request.

    Attributes:
        model: The name for the pod.
        number: By which its end is recorded; 0 where nobody judges it.
    """

    model: str
    number: int = 0


class _Draw(Struct, frozen=True):
    targets: tuple[Drawn, ...]
    limits: tuple[float, ...]  # of the targets' weights, added up
    models: tuple[str, ...]  # of the targets


class Rewrites:
    """The rules in force.

    Args:
        rng: Chooses among a rule's targets.
        error_rate: Of what takes canaries back; 0 to take none back.

    Attributes:
        spelling: How clients and pods write the names that pods list.
        is_active: A request without a header of its own may be rewritten.
    """

    def __init__(
        self,
        rules: Sequence[Rule] = (),
        error_rate: float = ERROR_RATE,
        *,
        rng: Random,
        spelling: Spelling = LISTED,
    ) -> None:
        self.spelling = spelling
        self._rng = rng
        self._declared: Collection[str] = ()
        self._error_rate = error_rate
        self._canaries: dict[Rule, Canaries] = {}
        self._judged: dict[int, tuple[Canaries, str]] = {}
        self._new_number = count(1).__next__
        self._has_news = False
        self.configure(rules, error_rate)

    def configure(self, rules: Sequence[Rule], error_rate: float = ERROR_RATE) -> None:
        """Replace the rules, in the order of their precedence.

        Canaries that are taken back stay so while their rule and the rate of errors are the same.
        """
        known = self._canaries if error_rate == self._error_rate else {}
        self._rules, self._error_rate = rules, error_rate
        self._canaries = {}
        for rule in rules:
            shares = rule.shares()
            if error_rate and len(shares) > 1:
                numbers = {target: self._new_number() for target in shares}
                self._canaries[rule] = known.get(rule) or Canaries(shares, numbers, error_rate)
        self._judged = {
            number: (each, target)
            for each in self._canaries.values()
            for target, number in each.numbers.items()
        }
        self._make_draws()

    def _make_draws(self) -> None:
        self._exact: dict[str, _Draw] = {}
        self._generic: _Draw | None = None
        for rule in self._rules:
            canaries, shares = self._canaries.get(rule), rule.shares()
            if canaries is not None:
                shares = {each: shares[each] for each in shares if each not in canaries.taken_back}
            if not shares:
                continue
            numbers = {} if canaries is None else canaries.numbers
            draw = _Draw(
                tuple(Drawn(target, numbers.get(target, 0)) for target in shares),
                tuple(accumulate(shares.values())),
                tuple(shares),
            )
            for model in rule.models:
                self._exact.setdefault(model, draw)
            if not rule.models and self._generic is None:
                self._generic = draw
        self._set_active()

    def _set_active(self) -> None:
        has_rules = bool(self._exact) or self._generic is not None
        self.is_active = has_rules or bool(self._declared) or self.spelling.joins

    def declare(self, names: Collection[str]) -> None:
        """Replace the adapters that pods may have under another name, known once one is picked."""
        self._declared = names
        self._set_active()

    def is_declared(self, model: str) -> bool:
        """Return whether pods may have a model under another name."""
        return model in self._declared

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """The models that rules name, each with the names that pods read instead."""
        return {model: draw.models for model, draw in self._exact.items()}

    def concerns(self, model: str) -> bool:
        """Return whether a pod may read another name than this, "" for none, for a request without
        a header."""
        listed = self.spelling.listed(model)
        if listed in self._exact or self._generic is not None or listed in self._declared:
            return True
        return self.spelling.full(listed) != model

    def draw(self, model: str, hinted: str = "") -> Drawn:
        """Return the name for the pod; to be asked once for each request, as it may be drawn.

        Args:
            model: The client's name; "" for a body without a model.
            hinted: By its header; "" for none.

        Returns:
            The name "" if neither the client nor a rule nor the header names a model.
        """
        draw = self._exact.get(model, self._generic)
        if draw is None:
            return Drawn(hinted or model)
        if len(draw.targets) == 1:
            return draw.targets[0]
        return self._rng.choices(draw.targets, cum_weights=draw.limits)[0]

    # --- canaries ----------------------------------------------------------------------------

    def refused(self, number: int) -> None:
        """Record that a request got no pod, by the number that was drawn for it."""
        canaries, target = self._judged.get(number, (None, ""))
        if canaries is not None and canaries.judge(target, failed=True):
            self._take_back()

    def ended(self, ended: Ended, is_attained: bool | None) -> None:
        """Record how a request ended, and whether its objective was met; None for no such."""
        canaries, target = self._judged.get(ended.pick.request.drawn_target, (None, ""))
        if canaries is not None and canaries.ended(target, ended, is_attained):
            self._take_back()

    def _take_back(self) -> None:
        self._has_news = True
        self._make_draws()

    @property
    def taken_back(self) -> list[tuple[Rule, str, str]]:
        """Return the rule and the name of each canary that is taken back, and why."""
        return [
            (rule, target, why)
            for rule, each in self._canaries.items()
            for target, why in each.taken_back.items()
        ]

    def losses(self) -> dict[str, str]:
        """Return what is said of rules with canaries that are taken back, by the rule's name."""
        reasons = defaultdict[str, list[str]](list)
        for rule, target, why in self.taken_back:
            reasons[rule.name].append(f"the canary {target} is taken back: {why}")
        return {name: listed(each) for name, each in reasons.items()}

    def warnings(self) -> list[str]:
        """Return the same, for people."""
        return [f"{name}: {why} (docs/canary.md)" for name, why in self.losses().items()]

    def take_news(self) -> list[str]:
        """Return the same once for each canary that is taken back."""
        has_news, self._has_news = self._has_news, False
        return self.warnings() if has_news else []

    def add_metrics(self, meters: Meters) -> None:
        """Register what is taken back."""
        meters.add_gauges(
            "canary_taken_back",
            "1 for a canary that failed, was late or answered with next to nothing so much more "
            "often than the standard of its rule that it gets no requests until the rule changes. "
            "`model` is the first name that clients write, `*` for any.",
            ("model", "version"),
            lambda: {((*rule.models, "*")[0], target): 1 for rule, target, _ in self.taken_back},
        )
