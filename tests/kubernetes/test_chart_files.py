"""What belongs to the chart and is generated, or is said twice: without Helm."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from extproc import __version__
from extproc.config import Config
from tests.kubernetes.chart import CHART
from tests.kubernetes.manifests import MANIFESTS

ROOT = MANIFESTS.parent


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every value by its path; empty mappings and lists are values."""
    if not isinstance(tree, dict) or not tree:
        return {path: tree}
    return {
        name: value
        for key, inner in tree.items()
        for name, value in leaves(inner, f"{path}.{key}" if path else key).items()
    }


def test_every_value_is_described() -> None:
    page = (ROOT / "docs" / "chart.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| `([\w.]+)` \|", page)
    values = leaves(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))

    assert rows
    assert [name for name in values if not any(f"{name}.".startswith(f"{r}.") for r in rows)] == []


def test_the_schema_of_the_router_s_configuration_is_that_of_its_models() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    config = schema["$defs"]["Config"]

    assert schema["properties"]["config"] == {"$ref": "#/$defs/Config"}
    assert config["properties"].keys() == Config.model_fields.keys()
    assert config["additionalProperties"] is False


def test_the_chart_has_the_version_of_the_router() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))

    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


@pytest.mark.parametrize(
    "page",
    [
        CHART / "README.md",
        MANIFESTS / "README.md",
        ROOT / "docs" / "envoy-gateway.md",
        ROOT / "docs" / "openshift.md",
    ],
)
def test_the_page_says_first_what_nobody_has_tried(page: Any) -> None:
    """As long as it is true."""
    first = page.read_text(encoding="utf-8").split("\n\n")[1]

    assert re.search(r"has\s+ever run on a kubelet", first)
