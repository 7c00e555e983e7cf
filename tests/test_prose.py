"""Pages read as they should: short sentences, plain words, no habits that hide the subject."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import ROOT, read
from tests.test_repository import pages, relative

EVIDENCE = {ROOT / "docs" / "archive", ROOT / "release" / "results"}
"""Dated records, which read as they were written."""
PAGES = [page for page in pages() if not EVIDENCE & set(page.parents)]


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
