"""How pages read: words, words a sentence, habits of language to avoid, and unknown words.

`python -m tests.prose [PAGE...]` prints a line for each page and what is wrong with it; `--words`
prints only the counts. A sentence ends with a full stop, a question mark or its block; a code span
is one word.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

KNOWN_WORDS = Path(__file__).with_name("words.txt")
LONG_WORDS = 25
"""A sentence with more words is long; nearly none is."""
TOO_LONG_WORDS = 35
MAX_MEAN_WORDS = 18.0
MAX_LONG_RATIO = 0.12
MAX_TOO_LONG_RATIO = 0.01
CELL_WORDS = 8
"""A cell of a table with fewer words is no sentence."""

_MARKDOWN = MarkdownIt().enable("table")
_END = re.compile(r"""(?<=[.!?])["')\]]*\s+(?=["'(\[]*[A-Z0-9X`])""")
_WORD = re.compile(r"[A-Za-z0-9][\w'\u2019./%-]*")
_PLAIN = re.compile(r"[A-Za-z]+(?:['\u2019][a-z]+)?")
HABITS = {
    "has no noun for a subject": (
        r"^(?:What|Who|Whoever|Whatever|Those that|That which|It is what)\b[^?]*$"
    ),
    "says die for crash": r"\b(?:die|dies|died|dying)\b",
    "says cut for interrupt": (
        r"\bcuts? (?:off|none|it|them|requests?|responses?|streams?)\b|\b(?:is|are) cut\b"
    ),
    "says roll for update": r"\broll(?:ed|s|ing)? (?:an|the|its|one|every|each|this) adapters?\b",
    "says beginnings for prefixes": r"\bbeginnings? of (?:a |the |their |its )?prompts?\b",
    "says dear for expensive": r"\bdear(?:er|est)?\b",
    "says verdict for result": r"\bverdicts?\b",
}
"""Habits to avoid, each with the pattern of a sentence that has it."""


@dataclass(frozen=True)
class Prose:
    """The sentences of a page, and of how many words they are."""

    sentences: tuple[str, ...]
    num_words: int

    @property
    def lengths(self) -> list[int]:
        return [len(_WORD.findall(each)) for each in self.sentences]

    @property
    def mean_words(self) -> float:
        return sum(self.lengths) / len(self.lengths) if self.sentences else 0.0

    def ratio_over(self, words: int) -> float:
        """The part of its sentences that have more words."""
        return sum(length > words for length in self.lengths) / max(len(self.sentences), 1)

    def faults(self) -> Iterator[str]:
        """What is wrong with it."""
        if self.mean_words > MAX_MEAN_WORDS:
            yield f"{self.mean_words:.1f} words a sentence, over {MAX_MEAN_WORDS:.0f}"
        for words, most in ((LONG_WORDS, MAX_LONG_RATIO), (TOO_LONG_WORDS, MAX_TOO_LONG_RATIO)):
            if (ratio := self.ratio_over(words)) > most:
                yield f"{ratio:.0%} of sentences over {words} words, more than {most:.0%}"
        yield from self.habits()

    def habits(self) -> Iterator[str]:
        """Its sentences with a habit to avoid."""
        for sentence in self.sentences:
            for fault, pattern in HABITS.items():
                if re.search(pattern, sentence):
                    yield f"{fault}: {sentence[:90]}"

    def unknown_words(self) -> set[str]:
        """The words that no dictionary and no list of ours has."""
        words = {word for each in self.sentences for word in _PLAIN.findall(each)}
        plain = {word.lower().replace("\u2019", "'").removesuffix("'s") for word in words}
        return {word for word in dictionary().unknown(plain) if word not in own_words()}


@cache
def dictionary() -> Any:
    """An English dictionary."""
    from spellchecker import SpellChecker

    return SpellChecker()


@cache
def own_words() -> frozenset[str]:
    """The field's words and names, which dictionaries lack."""
    return frozenset(KNOWN_WORDS.read_text(encoding="utf-8").lower().split())


@cache
def read(text: str) -> Prose:
    """The prose of a page in Markdown, without code."""
    sentences: list[str] = []
    num_words = 0
    opened = ""
    for token in _MARKDOWN.parse(re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)):
        if token.type.endswith("_open"):
            opened = token.type
        if token.type == "inline":
            plain = _plain(token.children or ())
            words = len(_WORD.findall(plain))
            num_words += words
            is_cell = opened in ("td_open", "th_open")
            if opened != "heading_open" and not (is_cell and words < CELL_WORDS):
                sentences += [each for each in _END.split(plain) if _WORD.search(each)]
    return Prose(tuple(sentences), num_words)


_SECTION = re.compile(r"^(?:Args|Attributes|Raises|Returns|The router's own):(?=\s|$)", re.M)
_ENTRY = re.compile(r"^ +\*{0,2}(?P<name>[\w.]+(?:, \w+)*): ", re.M)
_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) ", re.M)
_TABLE = re.compile(r"^ *[|├└].*\n?", re.M)
_CODE = re.compile(r"``?[^`]+``?")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def read_docstring(text: str) -> Prose:
    """The prose of a docstring: entries of `Args` and the like, and items of lists, are blocks."""
    plain = _TABLE.sub("", _SECTION.sub("\n\n", inspect.cleandoc(text)))
    plain = _ITEM.sub("\n\n", _ENTRY.sub("\n\n", plain))
    blocks = (" ".join(_CODE.sub("X", each).split()) for each in plain.split("\n\n"))
    sentences = tuple(each for block in blocks for each in _END.split(block) if _WORD.search(each))
    return Prose(sentences, sum(len(_WORD.findall(each)) for each in sentences))


def docstrings(source: str) -> Iterator[tuple[int, Prose]]:
    """The docstrings of a module and of all public classes and functions in it, by line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _Documented) and not getattr(node, "name", "").startswith("_"):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield getattr(node, "lineno", 1), read_docstring(text)


def _plain(tokens: Iterable[Token]) -> str:
    """The text of inline tokens, each code span as one word."""
    return "".join(_text(each) for each in tokens)


def _text(token: Token) -> str:
    if token.type in ("softbreak", "hardbreak"):
        return " "
    return {"text": token.content, "code_inline": "X"}.get(token.type, "")


def main(arguments: list[str]) -> None:
    only_words = "--words" in arguments
    for name in (each for each in arguments if not each.startswith("--")):
        prose = read(Path(name).read_text(encoding="utf-8"))
        print(
            f"{name}: {prose.num_words} words, {prose.mean_words:.1f} a sentence, "
            f"{prose.ratio_over(LONG_WORDS):.0%} over {LONG_WORDS}, "
            f"{prose.ratio_over(TOO_LONG_WORDS):.0%} over {TOO_LONG_WORDS}"
        )
        if not only_words:
            for fault in prose.faults():
                print(f"  {fault}")
            for length, each in sorted(zip(prose.lengths, prose.sentences, strict=True)):
                if length > LONG_WORDS:
                    print(f"  {length} words: {each}")
            if unknown := prose.unknown_words():
                print(f"  unknown: {' '.join(sorted(unknown))}")


if __name__ == "__main__":
    main(sys.argv[1:])
