"""The tables of teachers crossed with images, from docs/results/factorial.json; run it to renew the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from feature_tables import DOCS, RESULTS, mean, table, written

from strategies.run.files import read_json

OUT, PAGE = RESULTS / "factorial.json", DOCS / "lab" / "teacher-or-images.md"
CROSSED = ("noise", "Co-Boosting's", "real")  # the nine cells; DENSE's images are a block beside them
IMAGES = ("noise", "Co-Boosting's", "DENSE's", "real")
TEACHERS = ("mean", "learned weights", "Tally")
BLOCK = ["steps", "start"]
NAMES = {"adam": "AdamW", "sgd": "SGD"}


def chosen(found: pd.DataFrame) -> pd.DataFrame:
    """Return the cells of the optimiser that is better on the images that choose, for all steps and starts."""
    return pd.concat(
        [
            block[block["optimizer"] == scores_of(block).mean().idxmax()]
            for _, block in found.groupby(BLOCK, sort=False)
        ],
        ignore_index=True,
    )


def scores_of(block: pd.DataFrame) -> pd.DataFrame:
    """Return the accuracies on the images that choose, a column per optimiser, of those of the nine that all have."""
    nine = block[block["images"].isin(CROSSED)]
    return nine.pivot(index=["seed", "teacher", "images"], columns="optimizer", values="chosen_by").dropna()


def optimizers(found: pd.DataFrame) -> str:
    """Return a row per block that has a choice: the means that chose its optimiser, and over how many students."""
    rows = []
    for (steps, start), block in found.groupby(BLOCK, sort=False):
        both = scores_of(block)
        if len(both.columns) == len(NAMES):
            means = [f"{both[name].mean():.1f}" for name in NAMES]
            rows.append([f"{steps:,}", start, f"{len(both)}", *means])
    return table(["steps", "start", "students", *NAMES.values()], rows)


def cells(found: pd.DataFrame) -> str:
    """Return a row per block and teacher: the teacher, and its students' accuracy and agreement with it."""
    rows = []
    for (steps, start), block in chosen(found).groupby(BLOCK, sort=False):
        for teacher in TEACHERS:
            own = block[block["teacher"] == teacher]
            if own.empty:
                continue
            itself = own.groupby("seed")["taught"].first()
            students = [own[own["images"] == images] for images in IMAGES]
            shown = [
                f"{mean(cell['student'])} ({cell['agreement'].mean():.0f})" if len(cell) else "" for cell in students
            ]
            rows.append([f"{steps:,}", start, teacher, mean(itself), *shown, f"{own['cpu_s'].mean():.0f}"])
    return table(
        ["steps", "start", "teacher", "itself", "noise", *(f"{name} images" for name in IMAGES[1:]), "CPU s"], rows
    )


def effects_of(seed: pd.DataFrame) -> dict[str, float]:
    """Return the effects in the nine cells of a seed, in points.

    As long as cells are missing, they are over the images that both the mean and Tally taught on, and over the teachers
    that taught on all of these.
    """
    grid = seed.pivot(index="teacher", columns="images", values="student").reindex(index=TEACHERS, columns=CROSSED)
    grid = grid[grid.columns[grid.loc[["mean", "Tally"]].notna().all()]].dropna()
    if not {"noise", "real"} <= set(grid.columns):
        return {}
    by_teacher, by_images, better = grid.mean(axis=1), grid.mean(axis=0), grid.loc["Tally"] - grid.loc["mean"]
    return {
        **{f"teacher: {name} less mean": by_teacher[name] - by_teacher["mean"] for name in by_teacher.index[1:]},
        **{f"images: {name} less noise": by_images[name] - by_images["noise"] for name in by_images.index[1:]},
        "interaction: Tally less mean, on real less on noise": better["real"] - better["noise"],
        "Tally on noise less mean on real": grid.loc["Tally", "noise"] - grid.loc["mean", "real"],
    }


def effects(found: pd.DataFrame) -> str:
    """Return a row per effect and a column per block: mean and spread of the paired differences over the seeds."""
    columns = {
        f"{steps:,} steps, {start}": pd.DataFrame([effects_of(own) for _, own in block.groupby("seed")])
        for (steps, start), block in chosen(found).groupby(BLOCK, sort=False)
    }
    names = list(dict.fromkeys(name for each in columns.values() for name in each))
    return table(
        ["effect", *columns],
        [[name, *(signed(each[name].dropna()) if name in each else "" for each in columns.values())] for name in names],
    )


def signed(values: pd.Series[float]) -> str:
    """Return mean and spread of differences with the sign, and in how many seeds they are positive."""
    shown = mean(list(values))
    sign = "" if shown.startswith("-") else "+"
    return f"{sign}{shown}" + (f" ({int((values > 0).sum())} of {len(values)})" if len(values) > 1 else "")


TABLES = {"factorial:cells": cells, "factorial:effects": effects, "factorial:optimizers": optimizers}


def tables(out: Path = OUT) -> dict[str, str]:
    """Return the name of each table -> its text."""
    found: Any = pd.DataFrame(read_json(out)["rows"])
    found = found.sort_values(BLOCK, ascending=[True, False], kind="stable")  # the fresh start before the average
    return {name: made(found) for name, made in TABLES.items()}


def write(out: Path = OUT) -> None:
    """Renew the tables in the page."""
    text = PAGE.read_text()
    for name, made in tables(out).items():
        text = written(text, name, made)
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
