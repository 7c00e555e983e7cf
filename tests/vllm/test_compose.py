"""The command line of docker-compose.yml's real vLLM, read by vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.commandline import output_of
from tests.compose.files import services, unescape
from tests.vllm.server import PYTHON

PARSE = """
import importlib.util, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for module, *words in json.loads(sys.argv[1]):
    found = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert importlib.util.find_spec(module)
    modules = {each.name: each.path for each in found.lora_modules or ()}
    print(json.dumps([found.host, found.port, found.model, found.enable_lora, modules]))
"""


STUB = """#!/bin/sh
printf '%s\\n' "$@"
"""

MODULES = {
    "": {},
    "one=/adapters/one two=some/repository": {"one": "/adapters/one", "two": "some/repository"},
}
"""By `LORA_MODULES`."""


def test_vllm_accepts_the_options_and_has_the_started_module(tmp_path: Path) -> None:
    service = services()["vllm"]
    (tmp_path / "python3").write_text(STUB)
    (tmp_path / "python3").chmod(0o755)

    lines = [words_of(service, given, tmp_path) for given in MODULES]
    printed = output_of(PYTHON, "-c", PARSE, json.dumps(lines), within_s=280)

    model = service["environment"]["MODEL"]
    said = [json.loads(line) for line in printed.splitlines()[-len(MODULES) :]]
    assert said == [["0.0.0.0", 8000, model, True, modules] for modules in MODULES.values()]


def words_of(service: dict[str, Any], given: str, programs: Path) -> list[str]:
    """What the service gives to `python -m`."""
    words = output_of(
        *service["entrypoint"],
        unescape(service["command"][0]),
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            **{name: value or "" for name, value in service["environment"].items()},
            "LORA_MODULES": given,
        },
    ).splitlines()
    return words[words.index("-m") + 1 :]
