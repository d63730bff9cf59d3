"""The prose of README and docs: sentences that can be read at first sight, and a README that stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doc_pages import CONF, PAGES, ROOT, name_of, prose
from sentences import WORDS, sentences, too_long

README_LINES = 250


def remarks(path: Path) -> str:
    """Return the comments of a settings file that are text, without the commands among them."""
    lines = re.findall(r"^#(?!   )(.*)$", path.read_text(), re.MULTILINE)
    return "\n".join(line.strip() for line in lines)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_a_sentence_of_a_page_has_at_most_so_many_words(page: Path) -> None:
    assert too_long(prose(page)) == []


@pytest.mark.parametrize("path", CONF, ids=name_of)
def test_a_sentence_of_a_settings_file_has_at_most_so_many_words(path: Path) -> None:
    assert too_long(remarks(path)) == []


def test_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_sentences_are_distinguished_as_a_reader_does() -> None:
    long = " ".join(["word"] * (WORDS + 1))
    text = "\n".join(
        [
            "# A heading is none.",
            "First, see Allouah et al. (2024) and [a link](https://example.org/a.b). Then `one.code is all of this`",
            "$$formula$$",
            "| a | table. |",
            f"- {long}.",
            f"- {long.replace(' ', '. ', 1)}.",
        ]
    )

    assert next(sentences(text)) == "First, see Allouah et al (2024) and a link."
    assert too_long(text) == [f"- {long}."]
