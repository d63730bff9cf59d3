"""The tables of teachers crossed with images, from docs/results/factorial.json, made by tests/bench/factorial.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from feature_tables import DOCS, RESULTS, mean, table, written

from strategies.run.files import read_json

OUT, PAGE = RESULTS / "factorial.json", DOCS / "tally.md"
CROSSED = ("noise", "Co-Boosting's", "real")  # the nine cells; DENSE's images are a block beside them
IMAGES = ("noise", "Co-Boosting's", "DENSE's", "real")
TEACHERS = ("mean", "learned weights", "Tally")
BLOCK = ["steps", "start"]
NAMES = {"adam": "AdamW", "sgd": "SGD"}


def chosen(found: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of the optimiser that is better, on average of the nine, on the images that choose.

    Each number of steps and start has its own. An optimiser that was not measured in all cells is no candidate.
    """
    kept = []
    for _, block in found.groupby(BLOCK):
        scores = scores_of(block)
        if not scores.empty:
            kept.append(block[block["optimizer"] == scores.idxmax()])
    return pd.concat(kept)


def scores_of(block: pd.DataFrame) -> pd.Series[float]:
    """Return optimiser -> mean of the nine on the images that choose, over the seeds that all optimisers have."""
    nine = block[block["images"].isin(CROSSED)]
    whole = {
        name: {seed for seed, cells in own.groupby("seed") if len(cells) == len(CROSSED) * len(TEACHERS)}
        for name, own in nine.groupby("optimizer")
    }
    whole = {name: seeds for name, seeds in whole.items() if seeds}
    common = set.intersection(*whole.values()) if whole else set()
    candidates = nine[nine["optimizer"].isin(list(whole)) & nine["seed"].isin(common)]
    return candidates.groupby("optimizer")["chosen_by"].mean()


def optimizers(found: pd.DataFrame) -> str:
    """Return a row per block: the means that chose its optimiser."""
    rows = []
    for (steps, start), block in found.groupby(BLOCK):
        scores = scores_of(block)
        rows.append([f"{steps:,}", start, *(f"{scores[name]:.1f}" if name in scores else "" for name in NAMES)])
    return table(["steps", "start", *NAMES.values()], rows)


def cells(found: pd.DataFrame) -> str:
    """Return a row per block and teacher: the teacher, and its students' accuracy and agreement with it."""
    rows = []
    for (steps, start), block in chosen(found).groupby(BLOCK):
        for teacher in TEACHERS:
            own = block[block["teacher"] == teacher]
            itself = own.groupby("seed")["taught"].first()
            students = [own[own["images"] == images] for images in IMAGES]
            shown = [
                f"{mean(cell['student'])} ({cell['agreement'].mean():.0f})" if len(cell) else "" for cell in students
            ]
            rows.append([f"{steps:,}", start, teacher, mean(itself), *shown])
    return table(["steps", "start", "teacher", "itself", *(f"on {name} images" for name in IMAGES)], rows).replace(
        "on noise images", "on noise"
    )


def effects_of(seed: pd.DataFrame) -> dict[str, float]:
    """Return the effects in the nine cells of a seed, in points."""
    grid = seed.pivot(index="teacher", columns="images", values="student")
    by_teacher, by_images = grid[list(CROSSED)].mean(axis=1), grid[list(CROSSED)].mean(axis=0)
    better, worse = grid.loc["Tally"], grid.loc["mean"]
    return {
        "teacher: learned weights less mean": by_teacher["learned weights"] - by_teacher["mean"],
        "teacher: Tally less mean": by_teacher["Tally"] - by_teacher["mean"],
        "images: Co-Boosting's less noise": by_images["Co-Boosting's"] - by_images["noise"],
        "images: real less noise": by_images["real"] - by_images["noise"],
        "interaction: Tally less mean, on real less on noise": (better - worse)["real"] - (better - worse)["noise"],
        "one cell less another: Tally on noise less mean on real": better["noise"] - worse["real"],
    }


def effects(found: pd.DataFrame) -> str:
    """Return a row per effect and a column per block: mean and spread of the paired differences over the seeds."""
    columns: dict[str, Mapping[str, str]] = {}
    for (steps, start), block in chosen(found).groupby(BLOCK):
        nine = block[block["images"].isin(CROSSED)]
        seeds = [own for _, own in nine.groupby("seed") if len(own) == len(CROSSED) * len(TEACHERS)]
        each = pd.DataFrame([effects_of(own) for own in seeds])
        columns[f"{steps:,} steps, {start}"] = {name: signed(each[name]) for name in each}
    names = list(next(iter(columns.values())))
    return table(["effect", *columns], [[name, *(own[name] for own in columns.values())] for name in names])


def signed(values: pd.Series[float]) -> str:
    """Return mean and spread of differences with the sign, and in how many seeds they are positive."""
    shown = mean(list(values))
    sign = "" if shown.startswith("-") else "+"
    return f"{sign}{shown}" + (f" ({int((values > 0).sum())} of {len(values)})" if len(values) > 1 else "")


TABLES = {"factorial:cells": cells, "factorial:effects": effects, "factorial:optimizers": optimizers}


def tables(out: Path = OUT) -> dict[str, str]:
    """Return the name of each table -> its text."""
    found: Any = pd.DataFrame(read_json(out)["rows"])
    return {name: made(found) for name, made in TABLES.items()}


def write(out: Path = OUT) -> None:
    """Renew the tables in the page."""
    text = PAGE.read_text()
    for name, made in tables(out).items():
        text = written(text, name, made)
    PAGE.write_text(text)
