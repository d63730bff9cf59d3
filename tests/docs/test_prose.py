"""The prose of README and docs: sentences that can be read at first sight, and a README that stays short."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import CONF, PAGES, ROOT, name_of, prose

WORDS, README_LINES = 30, 250

MATHS = re.compile(r"\$\$.*?\$\$", re.DOTALL)
# What a reader takes in at one glance counts as one word: code, a formula, a link's text without its target.
GLANCES = (
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"``.+?``|`[^`]+`"), "code"),
    (re.compile(r"\$[^$]+\$"), "formula"),
    (re.compile(r"<[^>]+>"), ""),
)
# A full stop behind one of these ends no sentence.
SHORT_FORMS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|Eq|Eqs|Sec|Fig|No)\.")
END = re.compile(r"(?<=[.!?;])[\"')*_]*\s+|(?<=:)\s+(?=[A-Z])")
WORD = re.compile(r"[\w±%'.,/@+-]*\w[\w±%'.,/@+-]*")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page's text; headings, tables and formulas that stand alone are none."""
    lines = [line for line in MATHS.sub("\n", text).splitlines() if not re.match(r"\s*(\||#)", line)]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        plain = SHORT_FORMS.sub(r"\1", paragraph)
        for pattern, glance in GLANCES:
            plain = pattern.sub(glance, plain)
        yield from filter(None, END.split(" ".join(plain.split())))


def too_long(text: str) -> list[str]:
    return [sentence for sentence in sentences(text) if len(WORD.findall(sentence)) > WORDS]


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


def test_sentences_are_told_apart_as_a_reader_does() -> None:
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
