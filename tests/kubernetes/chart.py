"""The chart by the real Helm, which is a library here: rendered, and installed on an API server."""

from __future__ import annotations

import atexit
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.manifests import MANIFESTS, Object, objects

CHART = MANIFESTS.parent / "charts" / "extproc"
RELEASE = "extproc"
NAMESPACE = "llm"

Values = Mapping[str, Any]


def no_helm() -> str:
    """Why there is no Helm here, as a sentence; empty where there is."""
    return "" if find_spec("helm_python") else "no Helm: pip install '.[helm]'"


def with_image(values: Values) -> dict[str, Any]:
    """Values that name an image, without which the chart renders nothing."""
    return {**values, "image": {"repository": "extproc", **values.get("image", {})}}


def rendered(values: Values, *, name: str = RELEASE, namespace: str = NAMESPACE) -> list[Object]:
    """The objects that a release with these values is made of, without those of `helm test`."""
    found = texts(values, name=name, namespace=namespace)
    files = {path: text for path, text in found.items() if path.endswith(".yaml")}
    return [each for path in files if "/tests/" not in path for each in objects(files[path])]


def texts(values: Values, *, name: str = RELEASE, namespace: str = NAMESPACE) -> dict[str, str]:
    """All that is rendered with these values, by template; checked by the schema before."""
    import helm_python

    values = with_image(values)
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        found: dict[str, str] = chart.render(values, name=name, namespace=namespace)
    return found


def refusal(values: Values) -> str:
    """Why the schema, or the chart itself, refuses values; "" if they are taken."""
    import helm_python

    try:
        rendered(values)
    except helm_python.HelmError as error:
        return str(error)
    return ""


def findings(values: Values) -> list[str]:
    """What `helm lint` says that is worse than a recommendation."""
    import helm_python

    report = helm_python.lint(CHART, with_image(values))
    bad = [str(each) for each in report["messages"] if each["severity"] > 1]
    return [*bad, *map(str, report["errors"])]


@cache
def installable() -> Path:
    """A copy of the chart for API servers that were built without a version, as ours here."""
    folder = TemporaryDirectory(prefix="extproc-chart-")
    atexit.register(folder.cleanup)
    copy = Path(folder.name, CHART.name)
    shutil.copytree(CHART, copy)
    chart = copy / "Chart.yaml"
    text = chart.read_text(encoding="utf-8")
    changed = re.sub(r"(?m)^kubeVersion: .*\n", "", text)
    assert changed != text
    chart.write_text(changed, encoding="utf-8")
    return copy


class Releases:
    """Helm's commands in a namespace of an API server."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        import helm_python

        self.config = helm_python.Config(kubeconfig_path=server.kubeconfig, namespace=namespace)
        self.namespace = namespace

    def install(
        self, values: Values, *, name: str = RELEASE, create_namespace: bool = False
    ) -> None:
        """As `helm install` without waiting: no pod will ever be ready here."""
        new = create_namespace
        self.config.install(
            str(installable()),
            name,
            with_image(values),
            namespace=self.namespace,
            create_namespace=new,
        )

    def upgrade(self, values: Values, *, name: str = RELEASE) -> None:
        """As `helm upgrade --reset-values`."""
        chart, complete = str(installable()), with_image(values)
        self.config.upgrade(chart, name, complete, namespace=self.namespace, reset_values=True)

    def rollback(self, version: int, *, name: str = RELEASE) -> None:
        """As `helm rollback`."""
        self.config.rollback(name, version=version)

    def uninstall(self, *, name: str = RELEASE) -> None:
        """As `helm uninstall`."""
        self.config.uninstall(name)

    def revisions(self, *, name: str = RELEASE) -> list[str]:
        """The state of each revision, oldest first."""
        return [str(each["status"]) for each in self.config.history(name)]


@contextmanager
def releases(server: ApiServer, namespace: str) -> Iterator[Releases]:
    """Helm for a namespace."""
    helm = Releases(server, namespace)
    try:
        yield helm
    finally:
        helm.config.close()


def without_bookkeeping(each: Object) -> Object:
    """An object without what Helm or kustomize alone add: labels and annotations of releases."""
    helm = {"helm.sh/chart", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by"}
    labels = each["metadata"].get("labels", {})
    metadata = {"name": each["metadata"]["name"]}
    if kept := {key: value for key, value in labels.items() if key not in helm}:
        metadata["labels"] = kept
    return {**each, "metadata": metadata}


def example_values(name: str) -> Path:
    """A file of values of an overlay."""
    return MANIFESTS / "overlays" / name / "values.yaml"
