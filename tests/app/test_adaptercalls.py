"""What is done at pods for declared adapters, and where their files are looked for."""

from __future__ import annotations

from collections.abc import Collection

from extproc.app.adaptercalls import AdapterCalls
from extproc.config.file import parse_config
from extproc.core.pool import Pool

CONFIG = "{discovery: {file: pods.yaml}, adapters: {roots: [{pod: /adapters, router: /%s}]}}"


def test_adapters_whose_files_are_looked_for_elsewhere_are_tried_again() -> None:
    """Or one that failed for its files would rest for minutes after the configuration is right."""
    changed: list[Collection[str]] = []
    wrong, right = parse_config(CONFIG % "wrong"), parse_config(CONFIG % "right")
    calls = AdapterCalls(wrong, pool=Pool(), on_change=changed.append)
    calls.set_sources(["/adapters/a", "/adapters/b"])
    calls.configure(wrong)
    calls.configure(right)

    assert [set(each) for each in changed] == [{"/adapters/a", "/adapters/b"}]
