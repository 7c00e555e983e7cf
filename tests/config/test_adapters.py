"""The section `adapters`: stores and registration."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from extproc.config.adapters import AdaptersConfig

DIRECTORY = {"directory": {"path": "adapters"}}
SQLITE = {"sqlite": {"file": "adapters.db"}}


def test_nothing_is_stored_or_registered_by_default() -> None:
    section = AdaptersConfig()

    assert (section.store, section.registration) == (None, None)


@pytest.mark.parametrize(
    "store", [DIRECTORY, SQLITE, {"redis": {"url": "rediss://user@redis.example:6380/1"}}]
)
def test_a_store_is_one_of_its_kinds(store: dict[str, object]) -> None:
    section = AdaptersConfig.model_validate(
        {"store": store, "registration": {"token_file": "tokens"}}
    )

    assert section.registration is not None


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"store": {}}, "exactly one of: directory, sqlite, redis"),
        ({"store": DIRECTORY | SQLITE}, "exactly one of: directory, sqlite, redis"),
        ({"registration": {"token_file": "tokens"}}, "registration needs store"),
        ({"store": {"redis": {"url": "http://redis.example"}}}, "redis.url"),
        (
            {"store": {"redis": {"url": "redis://redis.example", "ca_file": "ca.pem"}}},
            "ca_file needs a url with rediss://",
        ),
    ],
)
def test_what_cannot_work_is_a_mistake(section: dict[str, object], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        AdaptersConfig.model_validate(section)
