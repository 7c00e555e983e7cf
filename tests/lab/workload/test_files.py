"""The laboratory's own files are found."""

from __future__ import annotations

import pytest

from extproc.lab.workload.clientele import own_folder


@pytest.mark.parametrize(("name", "file"), [("scenarios", "quick.yaml"), ("data", "arena27.csv")])
def test_scenarios_and_traces_are_found(name: str, file: str) -> None:
    assert (own_folder(name) / file).is_file()
