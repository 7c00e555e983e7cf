"""Whether an adapter changes what its base model answers.

An adapter may load and do nothing: of zeros, or for modules that the server does not adapt
(vllm-project/vllm issues 55193, 41754). Both models are asked for the first token after the same
few prompts, greedily, with the log-probabilities of the likeliest ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.bounds import has_few_values

PATH: Final = "/v1/completions"
PROMPTS: Final = ("The", "In 2021, the company", "Question: What is 17 + 25?\nAnswer:")
"""Several: what an adapter changes may round to nothing after one."""
NUM_LIKELIEST: Final = 5
"""As many as OpenAI allows."""
TOLERANCE: Final = 1e-3
"""Of a log-probability. Without an adapter's effect the same prompt gives the same to some 1e-6 in
float32. In bfloat16 a logit of 1 or more that changes at all changes by 2**-8, four times as much.
The cause may be an effect, or other requests in the batch. So a weak adapter is not taken for one
without effect. One without effect may be missed on a pod that has requests.
"""

Logprobs = tuple[Mapping[str, float], ...]
"""After each prompt, of the likeliest tokens."""


class _Logprobs(msgspec.Struct):
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    index: int
    logprobs: _Logprobs


MAX_VALUES = 10_000
"""Of an answer's JSON: some thousands with all that engines add."""


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def question(model: str) -> dict[str, Any]:
    """Return the body of the request to a model."""
    return {
        "model": model,
        "prompt": list(PROMPTS),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": NUM_LIKELIEST,
    }


def read_answer(body: bytes) -> Logprobs | None:
    """Return what a response says; None where it does not say it."""
    if not has_few_values(body, MAX_VALUES):
        return None
    try:
        choices = msgspec.json.decode(body, type=_Completion).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    choices.sort(key=lambda choice: choice.index)
    found = [choice.logprobs.top_logprobs for choice in choices]
    firsts = tuple([first for each in found for first in each[:1] if first])
    return firsts if len(firsts) == len(PROMPTS) else None


def has_effect(base: Sequence[Mapping[str, float]], adapter: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the answers of an adapter differ from those of its base model.

    One token that only one of them has among its likeliest is no difference: the last of them may
    be as likely as the next.
    """
    return any(_differ(one, other) for one, other in zip(base, adapter, strict=True))


def _differ(base: Mapping[str, float], adapter: Mapping[str, float]) -> bool:
    common = base.keys() & adapter.keys()
    if len(common) < min(len(base), len(adapter)) - 1:
        return True
    return any(abs(base[token] - adapter[token]) > TOLERANCE for token in common)
