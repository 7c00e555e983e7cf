"""Every configuration and every command of `extproc` that a page shows is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from extproc.commands.eppflags import FLAGS
from extproc.config.configfile import parse_config
from tests.pages import ROOT, blocks, guides, relative

NOT_OURS = {
    "adapter": "a part of an LLMRoute, after the whole one",
    "api": "inference-perf's",
    "command": "a picker in a load test, read by tests/lab/loadtest/test_programs.py",
    "containers": "a part of a pod",
    "fleet": "a part of a suite of the laboratory",
    "access_log": "Envoy's, run by tests/e2e/test_envoy_log.py",
    "model_list": "LiteLLM's, run by tests/e2e/test_litellm.py",
    "name": "a filter of Envoy's, run by tests/e2e/test_envoy_log.py",
    "networkPolicy": "values of the chart",
    "profile": "the laboratory's, as `calibrate` writes it",
}
"""First keys of blocks that are no configuration of the router."""


# --- configurations ------------------------------------------------------------------------------


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each YAML document of each page."""
    for page in guides():
        for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
            for document in yaml.safe_load_all(block):
                yield relative(page), document


def _is_ours(document: dict[str, Any]) -> bool:
    return "kind" not in document and next(iter(document)) not in NOT_OURS


CONFIGURATIONS = [
    pytest.param(each, id=f"{page}: {' '.join(each)}")
    for page, each in documents()
    if _is_ours(each)
]


@pytest.mark.parametrize("document", CONFIGURATIONS)
def test_every_configuration_that_is_shown_is_valid(document: dict[str, Any]) -> None:
    pool: dict[str, Any] = {} if "discovery" in document else {"discovery": {"static": []}}
    parse_config(yaml.safe_dump({**document, **pool}))


def test_what_is_not_ours_is_still_shown() -> None:
    first = {next(iter(each)) for _, each in documents() if "kind" not in each}

    assert NOT_OURS.keys() <= first


# --- commands ------------------------------------------------------------------------------------


def reference() -> dict[str, set[str]]:
    """The options of each command, as the page lists them that is made from the commands."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = re.split(r"^### extproc (.+)$", text, flags=re.M)
    listed = dict(zip(sections[1::2], sections[2::2], strict=True))
    options = {name: set(re.findall(r"(?<![\w-])--[a-z-]+", each)) for name, each in listed.items()}
    options["epp"] |= {f"--{flag}" for flag in FLAGS}
    return {name: each | {"--help"} for name, each in options.items()} | {
        "": {"--help", "--version", "--install-completion"}
    }


REFERENCE = reference()


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `extproc ...` in a block of shell or in the text, with its page."""
    for page in guides():
        text = page.read_text(encoding="utf-8")
        shell = "\n".join(blocks(text, "sh")).replace("\\\n", " ")
        lines = re.findall(r"^(?:[A-Z]+=\S+ )?(extproc .*)$", shell, flags=re.M)
        lines += re.findall(r"`(?:[A-Z]+=\S+ )?(extproc [a-z-]+(?: [^`]*)?)`", text)
        for line in lines:
            yield relative(page), shlex.split(re.split(r" [>&|<]|  #", line)[0])[1:]


COMMANDS = [pytest.param(words, id=f"{page}: {' '.join(words)}") for page, words in commands()]


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_that_is_shown_exists_with_its_options(words: list[str]) -> None:
    names = [" ".join(words[:length]) for length in (3, 2, 1, 0)]
    command = next(name for name in names if name in REFERENCE)
    written = {word.partition("=")[0] for word in words if word.startswith("--")}

    assert command or words[0].startswith("--"), f"no command: {words[0]}"
    assert written <= REFERENCE[command]
