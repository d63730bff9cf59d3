"""The sentences of pages and of source files, and the rules that each of them keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc

WORDS = 30
# Wordings that hide their subject; each has a plain one: "what is left" -> "the rest", "is allowed" -> "must be".
RIDDLES = re.compile(
    r"\b(what (is|are|was|were|there)|whoever|allowed (is|are)|(is|are) allowed"
    r"|(is|are|was|were) (said|told)|be told|nobody|says? nothing)\b",
    re.IGNORECASE,
)

MATHS = re.compile(r"\$\$.*?\$\$", re.DOTALL)
# A reader takes each of these in at one glance, so it counts as one word: code, a formula, the text of a link.
GLANCES = (
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),
    (re.compile(r"(:\w+:)?(``.+?``|`[^`]+`)"), "code"),
    (re.compile(r"\$[^$]+\$"), "formula"),
    (re.compile(r"\{[^{}]*\}"), "value"),
    (re.compile(r"<[^>]+>"), ""),
    (re.compile(r"[\w.-]+=\S+"), "setting"),
)
# A full stop behind one of these ends no sentence.
SHORT_FORMS = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|Eq|Eqs|Sec|Fig|No)\.")
END = re.compile(r"(?<=[.!?;])[\"')*_]*\s+|(?<=:)\s+(?=[A-Z]|must |needs )")
WORD = re.compile(r"[\w±%'.,/@+-]*\w[\w±%'.,/@+-]*")
# A list item, or an entry of a docstring such as ``name: its meaning``, starts a paragraph of its own.
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\s*\w[\w ]*:\s)")
TABLE = re.compile(r"\s*(\||#)")

LITERAL = re.compile(r"::\n\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)
# The parts of a method's source note that are a citation or a table of symbols.
CITATION = re.compile(r"^(Papers?|Symbols|Where|Source):.*?(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
PIECE = re.compile(r'#[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)
DIRECTIVE = re.compile(r"^#\s*(noqa[:\w, ]*?(  |$)|type: ignore\S*|fmt: \w+|!.*|mypy: .*)?\s*")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text; headings, tables and formulas that stand alone are none."""
    lines = [line for line in MATHS.sub("\n", text).splitlines() if not TABLE.match(line)]
    for paragraph in PARAGRAPH.split("\n".join(lines)):
        plain = SHORT_FORMS.sub(r"\1", paragraph)
        for pattern, glance in GLANCES:
            plain = pattern.sub(glance, plain)
        yield from filter(None, END.split(" ".join(plain.split())))


def too_long(text: str) -> list[str]:
    """Return the sentences of a text that have more than :data:`WORDS` words."""
    return [sentence for sentence in sentences(text) if len(WORD.findall(sentence)) > WORDS]


def riddles(text: str) -> list[str]:
    """Return the sentences of a text that hide their subject, see :data:`RIDDLES`."""
    return [sentence for sentence in sentences(text) if RIDDLES.search(sentence)]


def texts_of(source: str) -> Iterator[str]:
    """Yield the texts that people read in a Python file: docstrings, comments, help and messages."""
    parts: list[str] = []
    kind, end = "", 0
    for piece in PIECE.finditer(source):
        token, before = piece[0], source[end : piece.start()]
        alone = not source[source.rfind("\n", 0, piece.start()) + 1 : piece.start()].strip()
        this = "string" if token[0] != "#" and not token.startswith('"""') else f"{token[0]}{alone}"
        # Comments on lines of their own, and the pieces of a long string, are one text.
        if this != kind or this not in ("string", "#True") or before.strip(" \nfr"):
            yield "".join(parts)
            parts = []
        if this == "string":
            parts.append(token[1:-1].replace("\\n", "\n\n"))
        elif token[0] == "#":
            parts.append(f"\n{DIRECTIVE.sub('', token)}")
        elif alone and not source[: piece.start()].rstrip().endswith(("(", ",", "=")):
            parts.append(CITATION.sub("", LITERAL.sub("\n\n", f"{cleandoc(token[3:-3])}\n")))
        kind, end = this, piece.end()
    yield "".join(parts)
