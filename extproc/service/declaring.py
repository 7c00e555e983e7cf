"""All that is declared of adapters, from every source, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.adapters.declared import Declaration, DeclarationError, Names
from extproc.config import Config
from extproc.discovery.kubernetes.declarers import Reading
from extproc.routing.precedence import Merged, Offer, RuleSet, merge


class Declaring:
    """Merges what the configuration, a store and a cluster declare.

    Args:
        config: Checked configuration.
        on_merged: Called with what counts, at first and at each change; and with the names of
            adapters whose declarations are there and cannot be used.
    """

    def __init__(self, config: Config, on_merged: Callable[[Merged, frozenset[str]], None]) -> None:
        self._on_merged = on_merged
        self._config = config
        self._stored: Sequence[Declaration] = ()
        self._offers: Sequence[Offer] = ()
        self._withheld: frozenset[str] = frozenset()
        self._rules: Sequence[RuleSet] = ()

    def why_not(self, declaration: Declaration) -> str:
        """Return why what is declared over HTTP would not count; "" if it would.

        Raises:
            DeclarationError: Its source is in none of the folders of adapters.
        """
        roots = [str(each.pod).rstrip("/") for each in self._config.adapters.roots]
        path, name = declaration.source, declaration.name
        is_inside = any(f"{path}/".startswith(f"{root}/") for root in roots)
        if roots and path.startswith("/") and not is_inside:
            known = ", ".join(roots)
            raise DeclarationError(f"source {path!r}: must be in one of adapters.roots: {known}")
        own = [each.name for each in self._own()]
        return "it is declared by the configuration" if name in own else Names(own).why_not(name)

    def configure(self, config: Config) -> None:
        """Take a changed configuration."""
        self._config = config
        self.merge()

    def store(self, declarations: Sequence[Declaration]) -> None:
        """Take all that a store has."""
        self._stored = declarations
        self.merge()

    def set_offers(self, readings: Sequence[Reading[Offer]]) -> None:
        """Take all LLMRoutes of a cluster."""
        self._offers = [each.declared for each in readings if each.declared is not None]
        self._withheld = frozenset(each.withheld for each in readings if each.withheld)
        self.merge()

    def set_rules(self, readings: Sequence[Reading[RuleSet]]) -> None:
        """Take all InferenceModelRewrites of a cluster."""
        self._rules = [each.declared for each in readings if each.declared is not None]
        self.merge()

    def merge(self) -> None:
        """Hand on what counts."""
        routes = self._config.routes
        merged = merge(
            configured=[Offer(each) for each in (*self._own(), *self._stored)],
            routes=self._offers,
            rewrites=self._rules,
            routed={model for route in routes for model in route.models},
            aliased={model for route in routes if route.targets for model in route.models} - {"*"},
        )
        self._on_merged(merged, self._withheld - merged.offers.keys())

    def _own(self) -> list[Declaration]:
        """Return what the configuration itself declares."""
        routes = self._config.routes
        by_route = [route.adapter.declaration(route.models[0]) for route in routes if route.adapter]
        return by_route + [each.declaration(each.name) for each in self._config.adapters.declared]
