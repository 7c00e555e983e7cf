"""The toy tokenizer's counts."""

import pytest

from extproc.lab.fakepod.formats import chat_tokens, prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("", 1), ("abc", 1), ("abcd", 2), ([1, 2, 3], 3), (["abcd", "abcd"], 4), ([], 1), (7, 1)],
)
def test_a_prompt_is_a_text_or_token_ids(prompt: object, expected: int) -> None:
    assert prompt_tokens(prompt) == expected


def test_a_chat_counts_its_texts_and_four_tokens_a_message() -> None:
    parts = [{"type": "text", "text": "abcd"}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "user", "content": "abcd"}, {"role": "user", "content": parts}]

    assert chat_tokens(messages) == 4 + 2 + 4 + 2
    assert chat_tokens("no list") == 1
    assert chat_tokens([{"role": "user", "content": None}, "odd"]) == 2 * (4 + 1)
