"""The prose of the source: sentences that can be read at first sight, in docstrings, comments, help and messages."""

from __future__ import annotations

import textwrap

import pytest
from sentences import WORDS, riddles, texts_of, too_long
from sources import ROOT

FOLDERS = ("strategies", "fl_app", "client_app", "server_app", "deploy", "tests")
RULES = ("tests/sentences.py", "tests/contract/test_source_prose.py")  # they hold examples of bad prose


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sentence_of_the_source_is_short_and_names_its_subject(folder: str) -> None:
    hard = [
        f"{path.relative_to(ROOT)}: {sentence}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in RULES
        for text in texts_of(path.read_text(encoding="utf-8"))
        for sentence in (*too_long(text), *riddles(text))
    ]
    assert hard == []


def test_texts_of_a_file_are_its_docstrings_comments_and_strings() -> None:
    source = textwrap.dedent(
        '''
        """A summary.

        Paper: A citation, however long it is.
        Deviations: one.

        An example::

            code = "no prose"
        """

        NUMBER = 1  # behind code
        # A comment of
        # two lines.
        HELP = option("a text " "in two pieces")  # noqa: ARG001  a reason
        PROGRAM = run("""
            import sys
        """)
        '''
    )

    found = [" ".join(text.split()) for text in texts_of(source) if text.strip()]

    assert found == [
        "A summary. Deviations: one. An example",
        "behind code",
        "A comment of two lines.",
        "a text in two pieces",
        "a reason",
    ]


@pytest.mark.parametrize(
    "text",
    [
        " ".join(["word"] * (WORDS + 1)),
        "Keeps what is there.",
        "1 is allowed.",
        "For whoever reads it.",
        "It was said.",
    ],
)
def test_a_long_sentence_or_a_riddle_is_found(text: str) -> None:
    (found,) = [sentence for part in texts_of(f'"""{text}"""') for sentence in (*too_long(part), *riddles(part))]

    assert found == text
