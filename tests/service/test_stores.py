"""The store that the configuration names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from extproc.adapters.declared import Declaration
from extproc.adapters.stores.store import Store
from extproc.config.adapters import StoreConfig
from extproc.config.configfile import ConfigError, check_sections
from extproc.config.configured import registration_settings
from extproc.service.stores import make_medium

URL = "redis://127.0.0.1:1/0"


def store(section: dict[str, Any]) -> Any:
    return Store(make_medium(StoreConfig.model_validate(section), clock=lambda: 0.0))


@pytest.mark.parametrize("kind", ["directory", "sqlite"])
async def test_a_store_is_made_of_its_section(tmp_path: Path, kind: str) -> None:
    sections = {"directory": {"path": tmp_path}, "sqlite": {"file": tmp_path / "adapters.db"}}
    made = store({kind: sections[kind]})
    await made.put(Declaration("a"))
    await made.poll()
    await made.aclose()

    assert made.entries.keys() == {"a"}


async def test_redis_is_not_connected_to_before_it_is_used() -> None:
    pytest.importorskip("redis")
    made = store({"redis": {"url": URL}})
    await made.poll()
    await made.aclose()

    assert not made.is_known


@pytest.mark.parametrize("field", ["password_file", "ca_file"])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, field: str) -> None:
    pytest.importorskip("redis")
    section = {"url": "rediss://127.0.0.1:1/0", field: tmp_path / "none"}
    with pytest.raises(ConfigError, match=rf"adapters.store.redis.{field}: .*none: No such file"):
        store({"redis": section})


@pytest.mark.parametrize("content", ["", "two words\n"])
def test_a_token_file_that_cannot_be_used_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens").write_text(content)
    sections = {
        "discovery": {"file": "pods.yaml"},
        "adapters": {
            "store": {"directory": {"path": str(tmp_path)}},
            "registration": {"token_file": str(tmp_path / "tokens")},
        },
    }

    with pytest.raises(ConfigError, match="adapters.registration.token_file: .*tokens: "):
        registration_settings(check_sections(sections))


def test_without_its_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "extproc.adapters.stores.redis", None)
    with pytest.raises(
        ConfigError, match=r"adapters.store.redis needs the extra `redis`: .*\[redis\]"
    ):
        store({"redis": {"url": URL}})
