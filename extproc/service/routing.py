"""The objects that decide in one router, and how a configuration reaches them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from extproc.adapters.sources import DeclarationSources
from extproc.config import Config, configured
from extproc.config.configfile import ConfigError
from extproc.config.otherpolicies import TrialConfig
from extproc.config.sections import PolicyConfig
from extproc.observe.arms import ArmRecorder
from extproc.observe.attainment import Attainment
from extproc.observe.shadowing import ShadowSettings
from extproc.openai import Spelling
from extproc.peers.telling import Telling
from extproc.plugins import PolicyError, describe_error, load_policy
from extproc.pods.peerpicks import pick_ids
from extproc.pods.pool import Pool
from extproc.queue import HoldQueue
from extproc.queue.status import describe_queue
from extproc.reports.engines import PROFILES
from extproc.routing.catalog import Catalog
from extproc.routing.modelroutes import ModelRoute, ModelRoutes
from extproc.routing.picker import Picker, Readers
from extproc.routing.policies import BUILT_IN, Policy
from extproc.routing.rewrites import Rewrites, Rule
from extproc.routing.router import Router
from extproc.routing.trial import PolicyTrial
from extproc.service.clocks import Clocks
from extproc.types import Endpoint, Snapshot

log = logging.getLogger(__name__)


class Routing:
    """The parts that choose endpoints, and their configuration.

    Attributes:
        num_policy_failures: Choices that failed, by the policy's name.
        sources: Where adapters are declared.
        is_wanting: Set when a request waits for an adapter that nobody loads yet.
        arms: Records for a policy on trial.

    Args:
        config: Checked configuration.
        policy: The configured policy; `configure` replaces it.
        router_id: First part of the picks' ids.
        clocks: Clocks and randomness.
        readers: Of how picks came about; None for picks that are always read.
        telling: Tells other routers, if there are any.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        *,
        router_id: str,
        clocks: Clocks,
        readers: Readers | None = None,
        telling: Telling | None = None,
    ) -> None:
        self.sources, self.is_wanting = DeclarationSources(), asyncio.Event()
        catalog = Catalog(sources=self.sources, on_cold=self.is_wanting.set)
        queue = HoldQueue(
            configured.queue_settings(config),
            at=self._offer_at,
            on_change=None if telling is None else telling.waits,
        )
        self._offer_handle: asyncio.TimerHandle | None = None
        self.pool = Pool(
            configured.pool_settings(config),
            configured.outlier_settings(config),
            counts_first=True,
            queue=queue,
            catalog=catalog,
            observer=telling,
        )
        self.attainment, self.arms = Attainment(config.admin.slo_ttft_s), ArmRecorder()
        self._config = config
        self._declared_routes: Sequence[ModelRoute] = ()
        self._declared_rules: Sequence[Rule] = ()
        self._named_groups: set[str] = set()  # by discovery
        self._unknown_groups: set[str] = set()
        self._clock = clocks.clock
        # The policy in force counts from 0, so that its first failure is an increase.
        self.num_policy_failures = Counter({config.policy.name: 0})
        self._on_trial = self._begin(config)
        self.next_id = pick_ids(router_id)
        self._picker = Picker(
            policy,
            config.policy.name,
            rng=clocks.rng,
            next_id=self.next_id,
            settings=configured.picker_settings(config),
            admission=configured.admission_settings(config),
            fallback=_make_fallback(config),
            on_trial=self._on_trial,
            on_policy_error=self._on_policy_error,
            readers=readers,
        )
        self.routes = ModelRoutes(configured.model_routes(config), config.admission.priorities)
        self.router = Router(
            self.pool,
            self._picker,
            queue,
            catalog,
            config.request.max_hold_s,
            self.routes,
        )
        joins = PROFILES[config.pods.engine].joins_names
        self.rewrites = Rewrites(
            configured.rewrite_rules(config),
            config.canaries.error_rate,
            rng=clocks.rng,
            spelling=Spelling(self.router.card, joins),
        )
        self.router.models.aliases.configure(self.rewrites.aliases)
        self._follow_trial()

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration; warn of groups that it leaves out.

        Raises:
            ConfigError: The policy cannot be loaded. Nothing has changed.
        """
        policy, before = config.policy, self._config.policy
        is_same = (policy.name, policy.args) == (before.name, before.args)
        is_same_trial = is_same and policy.trial == before.trial
        on_trial = self._on_trial if is_same_trial else self._begin(config)
        self._picker.configure(
            self._picker.policy if is_same else make_policy(config),
            policy.name,
            configured.picker_settings(config),
            configured.admission_settings(config),
            _make_fallback(config),
            on_trial,
        )
        self.router.queue.configure(configured.queue_settings(config))
        self.pool.configure(configured.pool_settings(config), configured.outlier_settings(config))
        self.attainment.configure(config.admin.slo_ttft_s)
        self.num_policy_failures[config.policy.name] += 0
        if not is_same_trial:
            self._on_trial = on_trial
            self._follow_trial()
        self._config = config
        self.declare(self._declared_routes, self._declared_rules)
        self._warn_of_unknown_groups()
        self.router.queue.freed(self._clock())

    def _begin(self, config: Config) -> tuple[Policy, PolicyTrial] | None:
        """Make the policy on trial, and its trial; None where there is none.

        Raises:
            ConfigError: It cannot be loaded.
        """
        tried, settings = make_tried(config), config.policy.trial
        if tried is None or settings is None:
            return None
        return tried, PolicyTrial(
            settings.name,
            settings.share,
            by_tenant=settings.by == "tenant",
            on_worse=partial(self.arms.found_worse, settings.name),
        )

    def _follow_trial(self) -> None:
        """Record for the trial that has begun, or for none."""
        trial = None if self._on_trial is None else self._on_trial[1]
        self.arms.follow(trial)
        if trial is not None:
            self.num_policy_failures[trial.name] += 0

    def declare(self, routes: Sequence[ModelRoute], rules: Sequence[Rule]) -> None:
        """Replace the routes and the rules that come from outside the configuration."""
        config, self._declared_routes, self._declared_rules = self._config, routes, rules
        own = configured.model_routes(config)
        names = {route.name for route in own}
        others = [route for route in routes if route.name not in names]
        self.routes.configure([*own, *others], config.admission.priorities)
        self.rewrites.configure(
            [*configured.rewrite_rules(config), *rules], config.canaries.error_rate
        )
        self.router.models.aliases.configure(self.rewrites.aliases)

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Replace the endpoints; warn of groups that are not configured."""
        self._named_groups = {each.group for each in endpoints if each.group}
        self._warn_of_unknown_groups()
        self.pool.set_endpoints(endpoints)
        self.router.queue.freed(self._clock())

    @property
    def policy_name(self) -> str:
        """The name of the policy in force."""
        return self._config.policy.name

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the pool."""
        return self.pool.snapshot(now=self._clock())

    def queue(self) -> dict[str, Any]:
        """Return what is held, as plain values."""
        return describe_queue(self.router.queue, now=self._clock())

    def _offer_at(self, at_s: float) -> None:
        """Have the queue make an offer then, once the work at hand is done."""
        if self._offer_handle is not None:
            self._offer_handle.cancel()
        wait_s = max(0.0, at_s - self._clock())
        self._offer_handle = asyncio.get_running_loop().call_later(wait_s, self._offer)

    def _offer(self) -> None:
        self.router.offer(now=self._clock())

    def _on_policy_error(self, name: str, error: BaseException) -> None:
        self.num_policy_failures[name] += 1
        log.error("policy %s failed: %s", name, describe_error(error))

    def _warn_of_unknown_groups(self) -> None:
        """Warn of those that have become unknown since the last call."""
        unknown = self._named_groups - self._config.pods.groups.keys()
        for name in sorted(unknown - self._unknown_groups):
            log.warning("pods are in the group %r, which pods.groups does not have", name)
        self._unknown_groups = unknown


def _make_fallback(config: Config) -> tuple[str, Policy] | None:
    name = config.policy.fallback
    return (name, BUILT_IN[name]()) if name else None


def make_policy(config: Config) -> Policy:
    """Make the configured policy.

    Raises:
        ConfigError: It cannot be loaded.
    """
    return _load("", config.policy)


def make_tried(config: Config) -> Policy | None:
    """Make the policy on trial; None where there is none.

    Raises:
        ConfigError: It cannot be loaded.
    """
    trial = config.policy.trial
    return None if trial is None else _load("policy.trial: ", trial)


def _load(where: str, named: PolicyConfig | TrialConfig) -> Policy:
    try:
        return load_policy(named.name, named.args)
    except PolicyError as error:
        raise ConfigError(f"{where}{error}") from error


def shadow_settings(config: Config) -> ShadowSettings | None:
    """Return the settings of the policy in shadow; None without one."""
    beside, shadow = config.policy.name, config.policy.shadow
    return None if shadow is None else ShadowSettings(**dict(shadow), beside=beside)
