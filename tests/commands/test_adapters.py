"""The commands on a store, as people run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from tests.commandline import invoke

LINES = (
    '{"name":"a","source":"/adapters/a","version":"2"}\n'
    '{"name":"b","source":"hf:org/b","replicas":{"min":2,"max":3}}\n'
    '{"name":"x","priority":1,"targets":[{"model":"a","weight":9.0},{"model":"b"}]}\n'
)


@pytest.fixture(params=["directory", "sqlite"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    stores = {
        "directory": {"directory": {"path": str(tmp_path / "store")}},
        "sqlite": {"sqlite": {"file": str(tmp_path / "store" / "adapters.db")}},
    }
    path = tmp_path / "extproc.yaml"
    path.write_text(
        json.dumps({"discovery": {"static": []}, "adapters": {"store": stores[request.param]}})
    )
    return path


def call(config: Path, command: str, *options: str, given: str | None = None) -> Result:
    return invoke("adapters", command, "--config", str(config), *options, given=given)


def test_what_is_imported_is_exported_and_listed(config: Path) -> None:
    imported = call(config, "import", given=LINES)
    again = call(config, "import", given=LINES)

    assert (imported.exit_code, imported.output) == (0, "3 adapters: 3 changed, 0 refused\n")
    assert again.output == "3 adapters: 0 changed, 0 refused\n"
    assert call(config, "export").stdout == LINES
    assert call(config, "list").stdout == "a@2\t/adapters/a\nb\thf:org/b\nx\ta, b\n"


def test_what_is_declared_otherwise_is_replaced_only_where_that_is_wanted(config: Path) -> None:
    call(config, "import", given=LINES)
    other = LINES.replace("/adapters/a", "/other")
    refused = call(config, "import", given=other)
    replaced = call(config, "import", "--replace", given=other)

    assert (refused.exit_code, refused.stderr) == (
        1,
        "extproc: a is already declared with other content\n",
    )
    assert replaced.output == "3 adapters: 1 changed, 0 refused\n"
    assert call(config, "export").stdout == other


def test_one_wrong_line_imports_nothing(config: Path) -> None:
    result = call(config, "import", given=LINES + '\n{"name": "c", "source": "s3://c"}\n')

    assert result.exit_code == 2
    assert result.stderr.startswith("extproc: line 5: source 's3://c': ")
    assert call(config, "export").stdout == ""


def test_a_store_that_cannot_be_read_is_an_error(config: Path) -> None:
    folder = config.parent / "store"
    folder.rmdir()
    result = call(config, "export")

    assert result.exit_code == 1
    assert str(folder) in result.stderr


def test_a_configuration_without_a_store_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "extproc.yaml"
    path.write_text("discovery: {static: []}\n")
    result = call(path, "list")

    assert (result.exit_code, "adapters.store is not set" in result.stderr) == (2, True)
