"""`.github/workflows`: what they call exists here, and actions are pinned."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.__main__ import parser
from release.place import ROOT
from release.steps import STEPS

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE: dict[str, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
)
JOBS = RELEASE["jobs"]


def steps_of(path: Path) -> Iterator[dict[str, Any]]:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for job in document["jobs"].values():
        yield from job["steps"]


ALL = [pytest.param(step, id=path.stem) for path in WORKFLOWS for step in steps_of(path)]
RUN = [step["run"] for path in WORKFLOWS for step in steps_of(path) if "run" in step]


def made(words: list[str]) -> list[str]:
    """What `make release` passes on to `python -m release`."""
    given = dict(word.split("=", 1) for word in words[2:])
    return given["STEPS"].split() + given.get("ARGS", "").split()


def test_there_are_workflows() -> None:
    assert [path.stem for path in WORKFLOWS] == ["check", "release"]


@pytest.mark.parametrize("line", RUN)
def test_every_command_is_a_script_or_a_target_of_this_repository(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, re.M)
    else:
        script = ROOT / words[0]
        assert script.stat().st_mode & 0o111
        assert script.read_text(encoding="utf-8").startswith("#!")


@pytest.mark.parametrize("line", [line for line in RUN if line.startswith("make release ")])
def test_steps_and_arguments_are_ones_that_the_command_takes(line: str) -> None:
    given = parser().parse_args(made(shlex.split(line)))

    assert set(given.steps) <= STEPS.keys()


def test_the_workflow_does_every_step_once() -> None:
    lines = [made(shlex.split(line)) for line in RUN if line.startswith("make release ")]
    steps = [step for words in lines for step in parser().parse_args(words).steps]

    assert sorted(steps) == sorted(STEPS)


@pytest.mark.parametrize("step", ALL)
def test_every_action_is_pinned_by_its_commit_and_says_its_version(step: dict[str, Any]) -> None:
    if "uses" not in step:
        return
    assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step["uses"])
    lines = [line for path in WORKFLOWS for line in path.read_text().splitlines()]
    versions = {line.partition("# ")[2] for line in lines if step["uses"] in line}
    assert len(versions) == 1
    assert re.fullmatch(r"v\d+\.\d+\.\d+", versions.pop())


@pytest.mark.parametrize("step", ALL)
def test_no_expression_is_pasted_into_a_shell_but_digests_that_our_steps_wrote(
    step: dict[str, Any],
) -> None:
    """What a tag or a name contains must not become a command."""
    expressions = re.findall(r"\$\{\{ *(.*?) *\}\}", step.get("run", ""))

    assert set(expressions) <= {"steps.image.outputs.digest", "steps.chart.outputs.digest"}


def test_only_the_job_that_publishes_may_write() -> None:
    assert RELEASE["permissions"] == {"contents": "read"}
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]
    assert JOBS["publish"]["needs"] == ["packages", "image"]
    building = [step for step in JOBS["publish"]["steps"] if "STEPS=" in step.get("run", "")]
    assert [step["run"] for step in building] == ["make release STEPS=sums"]


def test_the_image_is_built_on_a_machine_of_each_architecture() -> None:
    matrix = JOBS["image"]["strategy"]["matrix"]["include"]

    assert {each["platform"]: each["architecture"] for each in matrix} == {
        "linux/amd64": "amd64",
        "linux/arm64": "arm64",
    }


def test_what_is_published_was_checked_against_the_tag_and_for_vulnerabilities() -> None:
    lines = [step.get("run", "") for job in JOBS.values() for step in job["steps"]]
    tagged = [line for line in lines if "--tag $GITHUB_REF_NAME" in line]

    assert len(tagged) == 2
    assert sum("--audit required" in line for line in tagged) == 1
