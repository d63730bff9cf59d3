"""Data sets of rows, each row an example of F features: the same quantities measured at several places.

``heart-disease``: Fed-Heart-Disease of FLamby (Ogier du Terrail et al., NeurIPS 2022, arXiv:2210.04620), as FENS uses
it (Allouah et al., NeurIPS 2024, Tables 14 and 15). Four centres collected these data (Detrano et al., 1989); they are
the four clients.

Columns 10 to 12, which hardly any centre but the first filled in, are dropped; so is every row with a missing value.
Chest pain and resting ECG become dummies without their first level. 34 % of each centre, stratified by class, are the
test.

A centre standardises its training rows by their own means and deviations. The test rows of all centres are
standardised by those of all training rows, as in FLamby's pooled test. With each centre's own, every client but the
smallest would score some points less than in FENS's table.

Deviation: a constant feature is only centred.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from strategies.core.errors import DataError

from .files import Remote, obtain

if TYPE_CHECKING:
    import pandas as pd

Labels = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]

TABLES = ("heart-disease",)
CLASSES = ("healthy", "ill")

CENTRES: Mapping[str, str] = {
    "cleveland": "2d91a8ff69cfd9616aa47b59d6f843db",
    "hungarian": "22e96bee155b5973568101c93b3705f6",
    "switzerland": "9a87f7577310b3917730d06ba9349e20",
    "va": "4249d03ca7711e84f4444768c9426170",
}
ADDRESS = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease"

# Columns of a file: 13 measurements, and the diagnosis, 0 (healthy) to 4.
COLUMNS = 14
SPARSE = (10, 11, 12)  # slope, vessels, thal
LEVELS: Mapping[int, tuple[int, ...]] = {2: (1, 2, 3, 4), 6: (0, 1, 2)}  # chest pain, resting ECG
FEATURES = COLUMNS - 1 - len(SPARSE) + sum(len(levels) - 2 for levels in LEVELS.values())

# FLamby's values, which give the same test rows.
TEST_SHARE = 0.34
SPLIT_SEED = 43


def open_centres(split: str, root: Path, *, download: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Open one half of Fed-Heart-Disease; its rows are sorted by centre.

    Args:
        split: ``"train"`` or ``"test"``.
        root: The folder that holds ``heart-disease/processed.<centre>.data``.

    Returns:
        The labels, int64 [N], the number of each row's centre, int64 [N], and the rows, float32 [N, 13, 1, 1].

    Raises:
        DataError: A file is missing or damaged; the message names its source.
    """
    folder = root / "heart-disease"
    files = {_file(centre): Remote(f"{ADDRESS}/{_file(centre)}", md5) for centre, md5 in CENTRES.items()}
    obtain("heart-disease", folder, files, download=download)
    labels, rows, trains = [], [], []
    for file in files:
        every, features = read_centre(folder / file)
        train, test = _halves(every)
        chosen = train if split == "train" else test
        labels.append(every[chosen])
        rows.append(features[chosen])
        trains.append(features[train])
    scales = trains if split == "train" else [np.concatenate(trains)] * len(trains)
    found = np.concatenate([standardized(part, scale) for part, scale in zip(rows, scales, strict=True)])
    centre = torch.repeat_interleave(torch.tensor([len(part) for part in labels]))
    return torch.from_numpy(np.concatenate(labels)), centre, torch.from_numpy(found).float()[:, :, None, None]


def standardized(rows: Reals, scale: Reals) -> Reals:
    """Return rows [n, F] standardised by the means and deviations of other rows [m, F]."""
    import pandas as pd

    others = pd.DataFrame(scale)
    deviation = others.std()
    # A deviation of 0 may be a rounding error.
    return ((pd.DataFrame(rows) - others.mean()) / deviation.where(deviation > 1e-9, 1.0)).to_numpy()


def read_centre(file: Path) -> tuple[Labels, Reals]:
    """Return the labels [n] and the features [n, 13] of a centre's complete rows, not standardised."""
    import pandas as pd

    try:
        texts = pd.read_csv(file, header=None, na_values="?", skipinitialspace=True)
        if texts.shape[1] != COLUMNS:
            raise ValueError(f"rows of shape {texts.shape[1:]}")
        rows = texts.astype(float).drop(columns=list(SPARSE)).dropna()
        if len(rows) < 4:
            raise ValueError(f"{len(rows)} complete rows")
        features = _with_dummies(rows.iloc[:, :-1])
        return np.asarray(rows.iloc[:, -1] > 0, np.int64), np.asarray(features, np.float64)
    except (OSError, ValueError) as error:
        raise DataError(
            f"file {file} under data.root is damaged: {' '.join(str(error).split())[:200]}; a line must be {COLUMNS} "
            "numbers, with '?' for a missing one"
        ) from error


def _file(centre: str) -> str:
    return f"processed.{centre}.data"


def _with_dummies(rows: pd.DataFrame) -> pd.DataFrame:
    """Replace each categorical column by one dummy column per level but the first, after the other columns."""
    import pandas as pd

    dummies = []
    for column, levels in LEVELS.items():
        if not rows[column].isin(levels).all():
            raise ValueError(f"column {column} has other values than {', '.join(map(str, levels))}")
        dummies.append(pd.get_dummies(pd.Categorical(rows[column], categories=levels), drop_first=True, dtype=float))
    return pd.concat(
        [rows.drop(columns=list(LEVELS)), *(each.set_index(rows.index) for each in dummies)], axis="columns"
    )


def _halves(labels: Labels) -> tuple[Positions, Positions]:
    """Divide a centre's rows; return the positions of its training and of its test rows, ascending."""
    from sklearn.model_selection import train_test_split

    stratify = labels if np.bincount(labels, minlength=2).min() > 2 else None
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=1 - TEST_SHARE,
        test_size=TEST_SHARE,
        random_state=SPLIT_SEED,
        stratify=stratify,
    )
    return np.sort(train), np.sort(test)
