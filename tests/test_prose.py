"""Pages read as they should: short sentences, plain words, no habits that hide the subject."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, guides, relative
from tests.prose import LONG_WORDS, TOO_LONG_WORDS, docstrings, read, read_docstring

MAX_LONG_IN_DOCSTRINGS = 0.07
"""The part of a room's sentences in docstrings that may have more words than `LONG_WORDS`."""
GENERATED = ROOT / "extproc" / "gen"
ROOMS = sorted(
    each.parent for each in (ROOT / "extproc").glob("*/__init__.py") if each.parent != GENERATED
)
PAGES = guides()


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_page_is_in_plain_english(page: Path) -> None:
    """`python -m tests.prose PAGE` shows each long sentence. The archive of evidence is exempt."""
    assert list(read(page.read_text(encoding="utf-8")).faults()) == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_a_page_has_known_words_only(page: Path) -> None:
    """A name or a term of the field that dictionaries lack goes into tests/words.txt."""
    assert read(page.read_text(encoding="utf-8")).unknown_words() == set()


def test_prose_is_measured_without_code_headings_and_short_cells() -> None:
    text = """# A heading of five words
Two words. `A span` is one, see [a link](x.md).

```sh
no words at all
```

| a cell |
|---|
| of this table |
| A cell of a table that is a sentence of its own. |
"""

    found = read(text)
    assert found.sentences == (
        "Two words.",
        "X is one, see a link.",
        "A cell of a table that is a sentence of its own.",
    )
    assert found.lengths == [2, 6, 12]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Who asks gets it.", "has no noun for a subject"),
        ("The process dies.", "says die for crash"),
        ("A response is cut.", "says cut for interrupt"),
        (" ".join(["word"] * 40) + ".", "words a sentence"),
    ],
)
def test_a_habit_is_found(text: str, fault: str) -> None:
    assert any(fault in found for found in read(text).faults())


def test_a_question_may_begin_with_what() -> None:
    assert list(read("What does it cost?").faults()) == []


def test_an_unknown_word_is_found() -> None:
    assert read("A word is qwertzui here.").unknown_words() == {"qwertzui"}


@pytest.mark.parametrize("room", [ROOT / "extproc", *ROOMS], ids=relative)
def test_docstrings_are_in_plain_english(room: Path) -> None:
    """Of modules, and of public classes and functions: no habit, none too long, few long."""
    files = room.glob("*.py") if room.name == "extproc" else room.rglob("*.py")
    faults, num_long, num_sentences = [], 0, 0
    for file in files:
        for line, prose in docstrings(file.read_text(encoding="utf-8")):
            faults += [f"{relative(file)}:{line}: {each}" for each in prose.habits()]
            for length, each in zip(prose.lengths, prose.sentences, strict=True):
                num_long += length > LONG_WORDS
                num_sentences += 1
                if length > TOO_LONG_WORDS:
                    faults.append(f"{relative(file)}:{line}: {length} words: {each[:90]}")

    assert faults == []
    assert num_long <= MAX_LONG_IN_DOCSTRINGS * num_sentences


def test_a_docstring_is_read_by_entry_and_item() -> None:
    text = """Return it. A `span` is one word.

    1. An item
       of four words.
    2. Another.

    Args:
        name: Its name, over
            two lines.
        other: "" for none.

    | a | table |
    """

    assert read_docstring(text).sentences == (
        "Return it.",
        "A X is one word.",
        "An item of four words.",
        "Another.",
        "Its name, over two lines.",
        '"" for none.',
    )
