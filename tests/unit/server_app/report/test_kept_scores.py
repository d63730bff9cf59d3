from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import MakeRun, compared, replayed
from method_fakes import telling

from fl_app.data import ImageData
from server_app.report.evaluation import KeptScores
from server_app.settings.build import build_job, held_out
from server_app.settings.read import read_settings
from server_app.settings.server_data import HeldOut
from strategies.core.durable import read_json
from strategies.method import Job
from strategies.run.run_folder import RunFolder


@pytest.fixture
def passes(ran: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the passes over the held-out images."""
    found: list[str] = []
    for name in ("scored", "member_scores"):
        whole = getattr(HeldOut, name)

        def counted(self: HeldOut, model: Any, name: str = name, whole: Any = whole) -> Any:
            found.append(name)
            return whole(self, model)

        monkeypatch.setattr(HeldOut, name, counted)
    return found


@pytest.mark.slow
def test_cells_on_the_same_uploads_have_the_rows_of_fresh_replays_and_score_the_uploads_once(
    run_folder: MakeRun, passes: list[str]
) -> None:
    run = run_folder()
    methods = ["dw-fedens", "fedavg", "fedens", "label-count-ensemble"]

    found = compared(run, methods=",".join(methods))
    in_cells = sorted(passes)
    passes.clear()
    alone = [replayed(run, method) for method in methods]

    tables = [read_json(Path(cell["run_dir"]) / "result.json")["table"] for cell in found["cells"]]
    assert tables == [result["table"] for result in alone]
    assert len({row["accuracy"] for row in tables[0]}) >= 3
    # One pass for all clients and FedENS, one for FedAvg, one for each of three methods' own results.
    assert in_cells == ["member_scores"] + ["scored"] * 4
    assert sorted(passes) == ["member_scores"] * 4 + ["scored"] * 6


@pytest.fixture
def stored(run_folder: MakeRun) -> tuple[Job, HeldOut]:
    settings = read_settings({"data.name": "digits", "threads": 1})
    images, split = held_out(settings)
    with RunFolder.open(run_folder(), write=False) as folder:
        return replace(build_job(settings, split, images), uploads=folder.round(1).uploads()), images


def asked(path: Path, job: Job, images: HeldOut) -> bool:
    """Return whether the scores had to be made."""
    made: list[int] = []
    score = KeptScores(path, job, images)("some", lambda: made.append(1) or 61.25)  # type: ignore[func-returns-value]
    assert score == 61.25
    return bool(made)


def test_scores_are_kept_for_the_same_uploads_and_images_only(stored: tuple[Job, HeldOut], tmp_path: Path) -> None:
    (job, images), path = stored, tmp_path / "scores.json"
    data = images.data
    first = telling(job.uploads[0], num_examples=1)
    flipped = ImageData(data.images.flip(0), data.labels)
    others = [
        (replace(job, uploads=job.uploads[1:]), images),
        (replace(job, uploads=(first, *job.uploads[1:])), images),
        (replace(job, student="mnist-cnn"), images),
        (replace(job, threads=2), images),
        (job, replace(images, data=flipped)),
        (job, replace(images, data=ImageData(data.images, (data.labels + 1) % 10))),
        (job, replace(images, normalization=images.normalization._replace(mean=(0.4,)))),
    ]

    assert asked(path, job, images)
    assert [asked(path, *other) for other in others] == [True] * len(others)
    assert not asked(path, replace(job, seed=9), replace(images, data=ImageData(data.images.clone(), data.labels)))
    assert [asked(path, *other) for other in others] == [False] * len(others)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}'])
def test_scores_that_cannot_be_read_are_made_anew(stored: tuple[Job, HeldOut], tmp_path: Path, text: str) -> None:
    (job, images), path = stored, tmp_path / "scores.json"
    path.write_text(text)

    assert asked(path, job, images)
    assert not asked(path, job, images)
