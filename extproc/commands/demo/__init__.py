"""`extproc demo`: the main job on a real Envoy, in a minute.

Two runs over the same requests: `round_robin` and the founding rule, each on four fresh fake pods
behind Envoy and the picker, all of them real processes on free ports of the loopback interface.
"""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["run_demo"]


def run_demo(*, keep: bool, seconds: float, rate: float, slots: int) -> int:
    """Run the demo.

    Args:
        keep: Stay up after it, until a signal.
        seconds: Length of each of the two runs.
        rate: Requests a second.
        slots: GPU slots for adapters on each pod.

    Returns:
        The exit status: 0 if no request failed, 128 and the signal's number if one ended it.
    """
    if importlib.util.find_spec("openai") is None:
        sys.stderr.write("extproc: the demo needs more: pip install 'lora-extproc[demo]'\n")
        return 2
    from extproc.commands.demo.story import run

    return run(keep=keep, seconds=seconds, rate=rate, slots=slots)
