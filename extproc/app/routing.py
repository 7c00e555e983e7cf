"""The core's objects of one router, and how a configuration reaches them. Part of `app`."""

from __future__ import annotations

from extproc.app import settings
from extproc.app.world import World
from extproc.config import Config
from extproc.config.file import ConfigError
from extproc.core.attainment import Attainment
from extproc.core.picker import Picker
from extproc.core.pickids import pick_ids
from extproc.core.policies import Policy
from extproc.core.pool import Pool
from extproc.core.router import Router
from extproc.core.types import Snapshot
from extproc.plugins import PolicyError, load_policy


class Routing:
    """What decides.

    Args:
        config: Checked configuration.
        router_id: The first part of the picks' ids.
        world: Clocks and randomness.

    Attributes:
        pool: The endpoints.
        attainment: Judges which requests were answered in time.
        router: Decides.

    Raises:
        ConfigError: The policy cannot be had.
    """

    def __init__(self, config: Config, *, router_id: str, world: World) -> None:
        self.pool = Pool(settings.pool_settings(config), settings.outlier_settings(config))
        self.attainment = Attainment(config.admin.slo_ttft_s)
        self._config = config
        self._clock = world.clock
        self._picker = Picker(
            _load(config),
            config.policy.name,
            rng=world.rng,
            next_id=pick_ids(router_id),
            settings=settings.picker_settings(config),
            admission=settings.admission_settings(config),
        )
        self.router = Router(self.pool, self._picker, config.request.max_hold_s)

    def configure(self, config: Config) -> None:
        """Take over what may change while we run.

        Raises:
            ConfigError: The policy cannot be had. Everything stays as it is.
        """
        is_same = config.policy == self._config.policy
        self._picker.configure(
            self._picker.policy if is_same else _load(config),
            config.policy.name,
            settings.picker_settings(config),
            settings.admission_settings(config),
        )
        self.pool.configure(settings.pool_settings(config), settings.outlier_settings(config))
        self.attainment.ttft_s = config.admin.slo_ttft_s
        self._config = config

    @property
    def policy_name(self) -> str:
        """The name of the policy in force."""
        return self._config.policy.name

    def snapshot(self) -> Snapshot:
        """The pool now."""
        return self.pool.snapshot(now=self._clock())


def _load(config: Config) -> Policy:
    try:
        return load_policy(config.policy.name, config.policy.args)
    except PolicyError as error:
        raise ConfigError(str(error)) from error
