"""A backbone of texts with random vectors of hashed words, for features.backbone=tiny_texts:make, and small news."""

import csv
import random
from pathlib import Path

import torch
from torch import nn

from fl_app.data.text import BUCKETS, LENGTH, tokens
from fl_app.models.backbones import Backbone, Texts
from fl_app.models.wordllama import MeanOfWords

TOPICS = ("war peace treaty border", "cup goal match coach", "shares bank oil profit", "chip space software robot")


def net() -> nn.Module:
    words = MeanOfWords(BUCKETS, 24)
    vectors = torch.randn(BUCKETS, 24, generator=torch.Generator().manual_seed(0))
    vectors[0] = 0.0
    words.load_state_dict({"embedding.weight": vectors})
    return words.eval()


def make() -> Backbone:
    return Backbone("tiny-texts", 24, net, texts=Texts(tokens, LENGTH, "crc32 of words"))


def shouting() -> Backbone:
    return Backbone("tiny-texts", 24, net, texts=Texts(lambda texts: tokens([*texts]), LENGTH, "crc32 of WORDS"))


def long() -> Backbone:
    return Backbone("tiny-texts", 24, net, texts=Texts(lambda texts: nn.functional.pad(tokens(texts), (0, 35)), 99, ""))


def write_news(root: Path, examples: int = 240) -> None:
    """Write news of four topics; every twentieth text of the training half has no word."""
    draws, folder = random.Random(0), root / "ag_news"
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            for number in range(examples):
                topic = number % len(TOPICS)
                words = " ".join(draws.choices(TOPICS[topic].split(), k=5))
                empty = name == "train" and number % 20 == 0
                csv.writer(file).writerow([topic + 1, "..." if empty else words, "!" if empty else "today"])
