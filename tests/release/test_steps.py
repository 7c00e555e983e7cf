"""The steps of a release, but for those that need an engine or a network."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import __version__
from release import __main__ as command
from release import steps
from release.notes import check_tag, draft, notes_of
from release.place import ROOT, Place, ReleaseError, run
from release.steps import CHART, judge, package_chart
from release.table import Record, as_markdown, write_checksums
from tests.pages import relative, tracked

CHANGELOG = """# Changelog

## [Unreleased]

- Next.

## [1.2.0] - 2026-01-02

- Something.

## [1.1.0] - 2025-01-02
"""


def checkout(folder: Path, version: str = "1.2.0", changelog: str = CHANGELOG) -> Place:
    """A checkout with a version and a changelog."""
    (folder / "extproc").mkdir()
    (folder / "extproc" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return Place(root=folder, out=folder / "dist")


def test_the_version_is_in_one_place() -> None:
    others = r"pyproject\.toml|Dockerfile|Makefile|release/\w+\.py|\.github/.+"
    files = [path for path in tracked() if re.fullmatch(others, relative(path))]
    named = re.compile(rf"\b{re.escape(__version__)}\b")

    assert len(files) > len(others.split("|"))
    assert [path for path in files if named.search(path.read_text(encoding="utf-8"))] == []
    assert Place().version == __version__


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"the tag v1\.3\.0 is not v1\.2\.0"):
        check_tag(checkout(tmp_path), "v1.3.0")


def test_a_tag_has_the_notes_of_its_version(tmp_path: Path) -> None:
    assert check_tag(checkout(tmp_path), "v1.2.0") == "- Something."


@pytest.mark.parametrize(
    ("version", "words"),
    [("1.1.0", "says nothing"), ("1.3.0", "has no section"), ("1.2", "no section")],
)
def test_a_version_without_notes_is_refused(version: str, words: str) -> None:
    with pytest.raises(ReleaseError, match=words):
        notes_of(version, CHANGELOG)


def test_a_dry_run_takes_the_unreleased_notes(tmp_path: Path) -> None:
    assert draft(checkout(tmp_path, "1.3.0")) == "- Next."


def test_a_changelog_without_anything_new_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="has no section"):
        draft(checkout(tmp_path, "1.3.0", "# Changelog\n\n## [Unreleased]\n"))


def test_this_checkout_has_notes() -> None:
    assert draft(Place())


def test_a_checkout_without_a_version_is_refused(tmp_path: Path) -> None:
    place = checkout(tmp_path)
    (tmp_path / "extproc" / "__init__.py").write_text("")

    with pytest.raises(ReleaseError, match="has no __version__"):
        _ = place.version


def files_of(package: Path) -> list[str]:
    """The names of the files in a packaged chart, without its own folder."""
    with tarfile.open(package) as archive:
        return sorted(name.partition("/")[2] for name in archive.getnames())


def test_a_chart_is_packaged_as_the_program_s_version(tmp_path: Path) -> None:
    chart = tmp_path / "tiny"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: tiny\nversion: 0.0.0\n")
    (chart / "templates" / "one.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: one}\n"
    )

    made = package_chart(chart, tmp_path / "out", "1.2.0")

    assert made == tmp_path / "out" / "tiny-1.2.0.tgz"
    assert files_of(made) == ["Chart.yaml", "templates/one.yaml"]
    run("tar", "-xzf", str(made), cwd=tmp_path / "out")
    packed = yaml.safe_load((tmp_path / "out" / "tiny" / "Chart.yaml").read_text())
    assert (packed["version"], packed["appVersion"]) == ("1.2.0", "1.2.0")


def test_a_folder_without_a_chart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"has no Chart\.yaml"):
        package_chart(tmp_path, tmp_path / "out", "1.2.0")


def test_a_chart_that_helm_refuses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Chart.yaml").write_text("apiVersion: v2\nversion: 0.0.0\n")

    with pytest.raises(ReleaseError, match="Helm does not package"):
        package_chart(tmp_path, tmp_path / "out", "1.2.0")


@pytest.mark.skipif(not (ROOT / CHART).is_dir(), reason="this checkout has no chart")
def test_the_chart_is_packaged(tmp_path: Path) -> None:
    assert "values.yaml" in files_of(package_chart(ROOT / CHART, tmp_path, __version__))


FINE: dict[str, Any] = {"name": "fine", "version": "1", "vulns": []}
SKIPPED = {"name": "new", "skip_reason": "not found"}


def test_a_known_vulnerability_ends_a_release() -> None:
    known = {"name": "old", "version": "1", "vulns": [{"id": "PYSEC-1"}]}

    with pytest.raises(ReleaseError, match="old 1: PYSEC-1"):
        judge([FINE, known], is_required=False)


@pytest.mark.parametrize("answers", [[], [FINE, SKIPPED]])
def test_no_answer_is_never_taken_for_a_good_one(answers: list[dict[str, Any]]) -> None:
    assert judge(answers, is_required=False).startswith("NOT DONE")
    with pytest.raises(ReleaseError, match="does not answer for all"):
        judge(answers, is_required=True)


def test_packages_that_were_all_looked_up_are_fine() -> None:
    assert judge([FINE], is_required=True) == "1 packages, no known vulnerability"


def test_checksums_are_what_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    for _ in range(2):  # its own file does not count
        write_checksums(tmp_path)

    said = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=tmp_path)
    assert said == "a: OK\nb: OK\n"


def test_the_table_has_every_step_and_file(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("1234")
    table = as_markdown([Record("wheel", 1.25, [tmp_path / "a.whl"], ["one", "two"])])

    assert "| wheel | 1.2 | one; two |" in table
    assert "| a.whl | 4 | `03ac674216f3e15c" in table


def test_a_step_that_fails_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(place: Place, record: Record) -> None:
        raise ReleaseError("something is wrong")

    monkeypatch.setattr(Place, "commit", lambda _: "0" * 40)  # an archive has none
    monkeypatch.setattr(steps, "STEPS", {**steps.STEPS, "wheel": fail})
    status = command.main(["notes", "wheel", "sums", "--out", str(tmp_path)])

    assert status == 1
    assert capsys.readouterr().err == "release: something is wrong\n"
    assert [path.name for path in tmp_path.iterdir()] == ["NOTES.md"]


def test_clearing_leaves_what_no_release_has_made(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine/file", "letter.txt", "extproc-0.0.1.tgz", "SHA256SUMS"):
        (tmp_path / name).write_text("")
    steps.clear(Place(out=tmp_path))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt", "mine"]
    assert (tmp_path / "mine" / "file").exists()


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(ReleaseError, match="failed with 3:\nno luck"):
        run("sh", "-c", "echo no luck; exit 3")
    with pytest.raises(ReleaseError, match="no-such-program"):
        run("no-such-program")


def test_a_file_that_a_release_should_have_once_is_there_once(tmp_path: Path) -> None:
    place = Place(out=tmp_path)
    with pytest.raises(ReleaseError, match=r"one file \*\.whl, and has none"):
        place.made("*.whl")
    (tmp_path / "a.whl").touch()
    assert place.made("*.whl") == tmp_path / "a.whl"
    (tmp_path / "b.whl").touch()
    with pytest.raises(ReleaseError, match=r"has a\.whl, b\.whl"):
        place.made("*.whl")
