"""The store that `adapters.store` names, and registration in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from extproc.adapters.changes import WhyNot
from extproc.adapters.registration import Registration, Status, Wait
from extproc.adapters.scope import Known
from extproc.adapters.stores.content import Medium
from extproc.adapters.stores.directory import Directory
from extproc.adapters.stores.sqlite import Sqlite
from extproc.adapters.stores.store import OnEntries, Store
from extproc.adapters.tokens import Tokens, read_tokens
from extproc.config import Config
from extproc.config.adapters import RedisStoreConfig, RegistrationConfig, StoreConfig
from extproc.config.file import ConfigError
from extproc.errors import needs_extra
from extproc.files.reading import describe_failure, read_key
from extproc.files.tls import client_context


def make_store(
    config: StoreConfig,
    *,
    clock: Callable[[], float],
    on_entries: OnEntries = lambda entries: None,
    on_failure: Callable[[str], None] = lambda message: None,
    on_recovery: Callable[[], None] = lambda: None,
    on_read: Callable[[], None] = lambda: None,
) -> Store:
    """Return the store; it connects to nothing yet.

    Raises:
        ConfigError: Its extra is not installed, or a file cannot be used.
    """
    return Store(
        _medium(config, clock),
        on_entries=on_entries,
        on_failure=on_failure,
        on_recovery=on_recovery,
        on_read=on_read,
    )


def make_registration(
    config: RegistrationConfig,
    store: Store,
    *,
    clock: Callable[[], float],
    status: Status,
    wait_until_ready: Wait,
    why_not: WhyNot,
    known: Known,
    on_failure: Callable[[str], None],
    on_change: Callable[[str], None],
) -> Registration:
    """Return what `AdminServer` adds to its paths; the arguments are those of `Registration`.

    Raises:
        ConfigError: The file of tokens cannot be used.
    """
    _check_tokens(config)
    tokens = Tokens(
        config.token_file, max_per_s=config.max_per_s, clock=clock, on_failure=on_failure
    )
    return Registration(
        store,
        tokens,
        status=status,
        wait_until_ready=wait_until_ready,
        why_not=why_not,
        known=known,
        ready_s=config.ready_s,
        on_change=on_change,
    )


def check_store(config: Config) -> None:
    """Check what can be known of the store and of registration without a connection.

    Raises:
        ConfigError: As `make_store` and `make_registration`.
    """
    adapters = config.adapters
    if adapters.store is not None:
        make_store(adapters.store, clock=lambda: 0.0)
    if adapters.registration is not None:
        _check_tokens(adapters.registration)


def _check_tokens(config: RegistrationConfig) -> None:
    path = config.token_file
    try:
        read_tokens(path)
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"adapters.registration.token_file: {path}: {why}") from error


def _medium(config: StoreConfig, clock: Callable[[], float]) -> Medium:
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
    path, password = config.password_file, None
    try:
        if path is not None:
            password = partial(read_key, path)
            password()
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"{section}.password_file: {path}: {why}") from error
    try:
        if config.ca_file is not None:
            client_context(config.ca_file)
    except OSError as error:
        why = describe_failure(error)
        raise ConfigError(f"{section}.ca_file: {config.ca_file}: {why}") from error
    return Redis(
        config.url,
        key=config.key,
        password=password,
        ca_file=config.ca_file,
        interval_s=config.interval_s,
    )
