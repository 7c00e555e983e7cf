"""The command line of docker-compose.yml's real vLLM, read by vLLM itself."""

from __future__ import annotations

import json
import re
import subprocess

from tests.compose.files import services, unescape
from tests.vllm.server import PYTHON

PARSE = """
import importlib.util, json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
found = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
assert importlib.util.find_spec(sys.argv[1])
modules = {each.name: each.path for each in found.lora_modules}
print(json.dumps([found.host, found.port, found.model, found.enable_lora, modules]))
"""


def test_vllm_takes_the_options_and_has_the_module_that_is_started() -> None:
    service = services()["vllm"]
    environment = {
        **service["environment"],
        "LORA_MODULES": "one=/adapters/one two=some/repository",
    }
    # As the shell would: the words of one variable, each for itself.
    line = re.sub(
        r'"?\$(\w+)"?', lambda name: environment[name[1]], unescape(service["command"][0])
    )
    words = line.split()
    module = words[words.index("-m") + 1]

    command = [str(PYTHON), "-c", PARSE, module, *words[words.index(module) + 1 :]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)

    assert done.returncode == 0, done.stderr[-2000:]
    modules = {"one": "/adapters/one", "two": "some/repository"}
    model = service["environment"]["MODEL"]
    assert json.loads(done.stdout.splitlines()[-1]) == ["0.0.0.0", 8000, model, True, modules]
