"""Lengths of prompts by a toy tokenizer: every four bytes are one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def prompt_tokens(prompt: object) -> int:
    """Count the tokens of a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return len(prompt.encode()) // 4 + 1
    if not isinstance(prompt, Sequence):
        return 1
    return max(1, sum(1 if isinstance(part, int) else prompt_tokens(part) for part in prompt))


def chat_tokens(messages: object) -> int:
    """Count the tokens of a chat: four for each message (its role and its ends) and its texts."""
    if not isinstance(messages, list):
        return 1
    return max(1, sum(4 + prompt_tokens(_texts(message)) for message in messages))


def _texts(message: object) -> list[str]:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return [part["text"] for part in parts if isinstance(part, dict) and _is_text(part)]


def _is_text(part: Mapping[str, object]) -> bool:
    return isinstance(part.get("text"), str)
