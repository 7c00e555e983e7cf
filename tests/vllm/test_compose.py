"""The command line of docker-compose.yml's real vLLM, read by vLLM itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.compose.files import services, unescape
from tests.vllm.server import PYTHON

PARSE = """
import importlib.util, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
assert importlib.util.find_spec(sys.argv[1])
modules = {each.name: each.path for each in found.lora_modules or ()}
print(json.dumps([found.host, found.port, found.model, found.enable_lora, modules]))
"""


STUB = """#!/bin/sh
printf '%s\\n' "$@"
"""


@pytest.mark.parametrize(
    ("given", "modules"),
    [
        ("", {}),
        (
            "one=/adapters/one two=some/repository",
            {"one": "/adapters/one", "two": "some/repository"},
        ),
    ],
)
def test_vllm_accepts_the_options_and_has_the_started_module(
    tmp_path: Path, given: str, modules: dict[str, str]
) -> None:
    service = services()["vllm"]
    (tmp_path / "python3").write_text(STUB)
    (tmp_path / "python3").chmod(0o755)
    words = subprocess.run(
        [*service["entrypoint"], unescape(service["command"][0])],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            **{name: value or "" for name, value in service["environment"].items()},
            "LORA_MODULES": given,
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()

    command = [str(PYTHON), "-c", PARSE, *words[words.index("-m") + 1 :]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stderr[-2000:]
    model = service["environment"]["MODEL"]
    assert json.loads(done.stdout.splitlines()[-1]) == ["0.0.0.0", 8000, model, True, modules]
