"""The section `peers` of the configuration."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from extproc.config.peers import PeersConfig


@pytest.mark.parametrize(
    "section", [{"service": "extproc"}, {"dns": "extproc"}, {"static": ["10.0.0.1:9002"]}]
)
def test_one_source_is_all_that_must_be_given(section: dict[str, object]) -> None:
    peers = PeersConfig.model_validate(section)

    assert peers.port is None


@pytest.mark.parametrize("section", [{}, {"service": "extproc", "dns": "extproc"}])
def test_no_source_and_two_sources_are_mistakes(section: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="exactly one of: service, dns, static"):
        PeersConfig.model_validate(section)


def test_peers_are_written_down_with_their_port() -> None:
    with pytest.raises(ValidationError):
        PeersConfig.model_validate({"static": ["10.0.0.1"]})
