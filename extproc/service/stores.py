"""The store that `adapters.store` names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from extproc.adapters.stores.content import Medium
from extproc.adapters.stores.directory import Directory
from extproc.adapters.stores.sqlite import Sqlite
from extproc.config.adapters import RedisStoreConfig, StoreConfig
from extproc.config.file import ConfigError, usable
from extproc.errors import needs_extra
from extproc.files.reading import read_key
from extproc.files.tls import client_context


def make_medium(config: StoreConfig, *, clock: Callable[[], float]) -> Medium:
    """Return what keeps declarations; it connects to nothing yet.

    Raises:
        ConfigError: Its extra is not installed, or a file cannot be used.
    """
    if (directory := config.directory) is not None:
        return Directory(directory.path, interval_s=directory.interval_s)
    if (sqlite := config.sqlite) is not None:
        return Sqlite(sqlite.file, interval_s=sqlite.interval_s, clock=clock)
    assert config.redis is not None
    return _redis(config.redis)


def _redis(config: RedisStoreConfig) -> Medium:
    section = "adapters.store.redis"
    try:
        from extproc.adapters.stores.redis import Redis
    except ImportError as error:
        raise ConfigError(needs_extra(section, "redis", error)) from error
    path = config.password_file
    password = None if path is None else partial(read_key, path)
    with usable(f"{section}.password_file", path):
        if password is not None:
            password()
    with usable(f"{section}.ca_file", config.ca_file):
        if config.ca_file is not None:
            client_context(config.ca_file)
    return Redis(
        config.url,
        key=config.key,
        password=password,
        ca_file=config.ca_file,
        interval_s=config.interval_s,
    )
