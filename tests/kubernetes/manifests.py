"""The manifests as users apply them: copied, the namespace changed, built by kubectl."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commandline import output_of
from tests.kubernetes.apiserver import find_program, missing_programs

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAYS = tuple(sorted(path.name for path in (MANIFESTS / "overlays").iterdir()))
MODEL_SERVERS = tuple(
    sorted(path.name for path in (MANIFESTS / "vllm").iterdir() if path.name != "base")
)

Object = dict[str, Any]

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on PATH (Debian package prometheus)"
)


def copied(to: Path, namespace: str) -> Path:
    """A copy of the manifests whose overlays are for another namespace."""
    target = to / "manifests"
    shutil.copytree(MANIFESTS, target)
    for path in target.glob("overlays/*/kustomization.yaml"):
        text = path.read_text()
        changed = re.sub(r"(?m)^namespace: \S+", f"namespace: {namespace}", text)
        assert changed != text, path
        path.write_text(changed)
    return target


def with_istio(manifests: Path) -> Path:
    """A copy whose overlay for InferencePools is for Istio's gateway, by one line to uncomment."""
    kustomization = manifests / "overlays" / "inference-pool" / "kustomization.yaml"
    text, line = kustomization.read_text(), "- ../../components/istio"
    assert f"# {line}" in text
    kustomization.write_text(text.replace(f"# {line}", line))
    return manifests


def build(folder: Path) -> str:
    """Return what `kubectl apply -k` would send. Without kubectl the test is skipped."""
    program = find_program("kubectl")
    if program is None:
        pytest.skip(missing_programs("kubectl"))
    return output_of(program, "kustomize", folder)


def objects(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def namespaced(text: str) -> list[Object]:
    """The objects that are in a namespace: all but definitions."""
    return [each for each in objects(text) if each["kind"] != "CustomResourceDefinition"]


def only(text: str, kind: str, name: str = "") -> Object:
    """The one object of this kind, or of this kind and name."""
    (found,) = (
        each
        for each in objects(text)
        if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return found


def router_config(text: str) -> Object:
    """The configuration file that the overlay's ConfigMap brings."""
    (found,) = (
        each["data"]["extproc.yaml"]
        for each in objects(text)
        if each["kind"] == "ConfigMap" and "extproc.yaml" in each["data"]
    )
    config: Object = yaml.safe_load(found)
    return config


def declaring(*names: str) -> Object:
    """The section `routes` that declares adapters: overlays refuse all others."""
    routes = [{"name": name, "models": [name], "adapter": {}} for name in names]
    return {"routes": routes}


def container(text: str) -> Mapping[str, Any]:
    """The router's container."""
    (found,) = only(text, "Deployment", "extproc")["spec"]["template"]["spec"]["containers"]
    spec: Mapping[str, Any] = found
    return spec
