"""The Dockerfile, read without an engine."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from extproc.config.configfile import load_config
from tests.compose.files import FILES, ROOT, dockerfile, services

STAGES = [index for index, (word, _) in enumerate(dockerfile()) if word == "FROM"]
BUILD, FINAL = dockerfile()[STAGES[0] : STAGES[1]], dockerfile()[STAGES[-1] :]
LOADTEST = dockerfile()[STAGES[1] : STAGES[2]]


def arguments(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [rest for word, rest in stage if word == instruction]


def copied() -> list[str]:
    """The paths that are copied from the repository."""
    return [
        source
        for rest in arguments(BUILD, "COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def installed_extras() -> set[str]:
    """The extras that are installed by default."""
    (names,) = (rest for rest in arguments(BUILD, "ARG") if rest.startswith("EXTRAS="))
    return set(names.removeprefix("EXTRAS=").split(","))


def test_all_stages_have_one_base_of_one_version() -> None:
    """Else the virtual environment's links lead nowhere."""
    (base,) = (rest for word, rest in dockerfile()[: STAGES[0]] if word == "ARG")

    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-[a-z]+", base)
    bases = [rest.split(" AS ")[0] for rest in arguments(dockerfile(), "FROM")]
    assert bases == ["${BASE}", "build", "${BASE}"]
    assert arguments(FINAL, "COPY") == ["--from=build /venv /venv"]


def test_every_copied_path_exists_and_is_not_ignored() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    kept = [rule[1:] for rule in rules if rule.startswith("!")]

    assert "*" in rules
    assert sorted(kept) == sorted(copied())
    assert [source for source in copied() if not (ROOT / source).exists()] == []


def test_every_source_of_the_package_is_copied() -> None:
    """What pyproject.toml names: sources, the data that the wheel carries, readme, licence."""
    found = project()
    wheel = found["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], found["project"]["readme"]]
    needed += found["project"]["license-files"] + ["pyproject.toml"]

    missing = [
        each
        for each in needed
        if not any(each == source or each.startswith(f"{source}/") for source in copied())
    ]
    assert missing == []


def test_the_extras_exist() -> None:
    assert installed_extras() <= project()["project"]["optional-dependencies"].keys()


def test_every_installed_package_is_pinned_to_a_version_that_fits() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    found = project()["project"]
    wanted = list(found["dependencies"])
    for extra in installed_extras():
        wanted += found["optional-dependencies"][extra]

    for requirement in map(Requirement, wanted):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement}: run scripts/gen-constraints"
        assert requirement.specifier.contains(version), (
            f"{requirement}: run scripts/gen-constraints"
        )


def test_it_runs_as_a_numeric_user_that_is_not_root() -> None:
    """Kubernetes cannot tell whether a name is root."""
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", arguments(FINAL, "USER")[-1])


def test_the_stage_for_load_tests_has_a_fitting_locust_and_is_not_root() -> None:
    service = services()["locust"]
    (install,), (user,) = arguments(LOADTEST, "RUN"), arguments(LOADTEST, "USER")
    extras = project()["project"]["optional-dependencies"]["loadtest"]
    (locust,) = (each for each in map(Requirement, extras) if each.name == "locust")

    assert arguments(LOADTEST, "FROM") == [f"build AS {service['build']['target']}"]
    (version,) = re.findall(r"locust==([\d.]+)$", install)
    assert locust.specifier.contains(version)
    assert user == arguments(FINAL, "USER")[-1]
    assert service["entrypoint"] == ["locust"]


def test_it_starts_our_command_with_the_mounted_configuration() -> None:
    (entry,), (command,) = (arguments(FINAL, word) for word in ("ENTRYPOINT", "CMD"))
    (port_check,) = arguments(FINAL, "HEALTHCHECK")

    assert json.loads(entry)[0] in project()["project"]["scripts"]
    path = json.loads(command)[-1]
    assert json.loads(command) == ["serve", "--config", path]
    assert services()["router"]["command"] == json.loads(command)
    assert any(f":{path}:ro" in volume for volume in services()["router"]["volumes"])
    assert "/dev/tcp/127.0.0.1/9090" in port_check  # admin.address by default
    assert "GET /healthz" in port_check


def test_it_exposes_the_ports_of_the_router() -> None:
    config = load_config(FILES / "router.yaml")
    used = {config.server.address, config.admin.metrics_address or ""}

    assert {each.rpartition(":")[2] for each in used} <= set(arguments(FINAL, "EXPOSE")[0].split())


@pytest.mark.parametrize(
    "label", ["title", "description", "licenses", "version", "revision", "created", "source"]
)
def test_it_has_labels_that_a_build_can_set(label: str) -> None:
    (labels,) = arguments(FINAL, "LABEL")
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    names = {rest.partition("=")[0] for rest in arguments(FINAL, "ARG")}

    assert found[label]
    assert set(re.findall(r"\$\{(\w+)\}", found[label])) <= names


def test_no_file_with_the_name_of_a_secret_is_copied() -> None:
    names = [path.name for source in copied() for path in _files(ROOT / source)]

    assert [
        n for n in names if any(fnmatch.fnmatch(n, p) for p in ("*.pem", "*.key", ".env*"))
    ] == []


def _files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
