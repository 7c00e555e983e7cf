"""What is done at pods for declared adapters, and where their files are looked for."""

from __future__ import annotations

from collections.abc import Collection

from extproc.app import settings
from extproc.app.adaptercalls import AdapterCalls
from extproc.config.file import parse_config
from extproc.core.adapters.states import Action, Failure, Kind
from extproc.core.pool import Pool
from tests.builders import address, endpoint, pick

CONFIG = "{discovery: {file: pods.yaml}, adapters: {roots: [{pod: /adapters, router: /%s}]}}"


def test_adapters_whose_files_are_looked_for_elsewhere_are_tried_again() -> None:
    """Or one that failed for its files would rest for minutes after the configuration is right."""
    changed: list[Collection[str]] = []
    wrong, right = parse_config(CONFIG % "wrong"), parse_config(CONFIG % "right")
    calls = AdapterCalls(wrong, pool=Pool(), on_change=changed.append, clock=lambda: 0.0)
    calls.set_sources(["/adapters/a", "/adapters/b"])
    calls.configure(wrong)
    calls.configure(right)

    assert [set(each) for each in changed] == [{"/adapters/a", "/adapters/b"}]


async def test_nothing_is_loaded_that_would_mix_weights_with_requests_that_have_just_come() -> None:
    config = parse_config("{discovery: {file: pods.yaml}}")
    pool = Pool(settings.pool_settings(config))
    pool.set_endpoints([endpoint(1)])
    pool.record_version(address(1), "0.25.1", asked_at_s=0.0)
    pool.flights.start(pick(), now=0.0)
    calls = AdapterCalls(config, pool=pool, on_change=lambda _sources: None, clock=lambda: 0.0)
    calls.set_endpoints([endpoint(1)])
    async with calls.opened():
        result = await calls.make(Action(Kind.LOAD, address(1), "a", "/a"))

    assert result.failure is Failure.UNSAFE_VERSION
    assert calls.counts["load", "unsafe_version"] == 1
