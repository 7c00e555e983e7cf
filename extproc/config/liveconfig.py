"""Changes of the configuration file while the service runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic.fields import FieldInfo

from extproc.config import Config
from extproc.config.base import Section
from extproc.config.configfile import ConfigParser
from extproc.config.warnings import short_expiry
from extproc.files.filewatch import FileWatch
from extproc.meters import Meters

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two checks of the file."""


class LiveConfig:
    """Applies changes of the file.

    Args:
        config: The configuration at the start.
        path: The file; None for none.
        text: Its content at the start.
        parse: Parses its later contents.
        configure: Applies a configuration; raises `ConfigError` if it cannot.
        wall_clock: Wall seconds.

    Attributes:
        num_failures: Changes that could not be applied.
        applied_wall_s: Wall seconds of the last change that was applied; 0 for none.
    """

    def __init__(
        self,
        config: Config,
        path: Path | None,
        text: str,
        *,
        parse: ConfigParser,
        configure: Callable[[Config], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self.num_failures, self.applied_wall_s = 0, 0.0
        self._wall_clock = wall_clock
        self._config = self._started = config
        self._refusal = ""
        self._path, self._text, self._parse = path, text, parse
        self._configure = configure

    def add_metrics(self, meters: Meters) -> None:
        """Register the changes that failed, and when one did not."""
        meters.add_gauge(
            "config_failures",
            "Changes of the configuration file that were not applied.",
            lambda: self.num_failures,
        )
        meters.add_gauge(
            "config_applied_timestamp_seconds",
            "Unix time of the last change of the configuration file that was applied; 0 for none "
            "since the start.",
            lambda: self.applied_wall_s,
        )

    def warnings(self) -> list[str]:
        """Return what of the file is not in force, and what a restart would do, for people."""
        if self._refusal:
            said = f"not applied, and a router that starts with it ends: {self._refusal}"
            return [f"configuration: {said}"]
        fields = ", ".join(needs_restart(self._started, self._config))
        return [f"configuration: needs a restart to take effect: {fields}"] if fields else []

    async def run(self) -> None:
        """Follow the file until cancelled."""
        if self._path is None:
            return
        await FileWatch(
            self._path,
            interval_s=INTERVAL_S,
            on_change=self._on_change,
            on_failure=self._on_failure,
            on_recovery=self._on_recovery,
            text=self._text,
        ).run()

    def _on_change(self, text: str) -> None:
        """Apply a text.

        Raises:
            ConfigError: Nothing has changed.
        """
        fresh = self._parse(text, source=str(self._path))
        self._configure(fresh)
        changed = list(needs_restart(self._config, fresh))
        self._config, self.applied_wall_s = fresh, self._wall_clock()
        for line in short_expiry(fresh):
            log.warning(line)
        if changed:
            log.warning("configuration: needs a restart to take effect: %s", ", ".join(changed))
        policy = fresh.policy
        log.info("configuration applied: policy %s %s", policy.name, policy.args)

    def _on_failure(self, message: str) -> None:
        self.num_failures += 1
        self._refusal = message
        log.error("configuration not applied: %s", message)

    def _on_recovery(self) -> None:
        self._refusal = ""


def needs_restart(old: Config, new: Config) -> Iterator[str]:
    """Yield the fields, as `section.field`, that differ and are not live."""
    for section, whole in Config.model_fields.items():
        before, after = getattr(old, section), getattr(new, section)
        if before == after or _is_live(whole):
            continue
        if not (isinstance(before, Section) and isinstance(after, Section)):
            yield section
            continue
        for name, field in type(after).model_fields.items():
            if not _is_live(field) and getattr(before, name) != getattr(after, name):
                yield f"{section}.{name}"


def _is_live(field: FieldInfo) -> bool:
    return (field.description or "").endswith("Live.")
