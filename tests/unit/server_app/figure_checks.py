"""Checks of the texts of a figure, for the tests of every plot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure


def drawn(figure: Figure) -> Any:
    """Draw the figure, so that every text has its place, and return its renderer."""
    figure.canvas.draw()
    return figure.canvas.get_renderer()  # type: ignore[attr-defined]


def assert_inside_and_apart(figure: Figure, texts: Sequence[Any]) -> None:
    renderer, edge = drawn(figure), figure.bbox
    boxes = [text.get_window_extent(renderer) for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= edge.x0, f"{text.get_text()!r} is cut off"
        assert box.y0 >= edge.y0, f"{text.get_text()!r} is cut off"
        assert box.x1 <= edge.x1, f"{text.get_text()!r} is cut off"
        assert box.y1 <= edge.y1, f"{text.get_text()!r} is cut off"
    for above, below in pairwise(boxes):
        assert below.y1 <= above.y0 + 1.0, "names overlap"
