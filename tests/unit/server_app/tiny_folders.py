"""Folders of Hugging Face with tiny random classifiers: a BERT that knows the words of small news, and a ViT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_texts import TOPICS

import strategies.core.vision  # noqa: F401  before transformers, which imports torchvision

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32
}  # fmt: skip


def write_bert(folder: Path, *, classes: int = 2) -> str:
    """Write a classifier of texts with its tokenizer; return the folder's name as a model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *" ".join(TOPICS).split()])}
    config = transformers.BertConfig(**SIZES, vocab_size=len(words), max_position_embeddings=24, num_labels=classes)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return f"hf:{folder}"


def write_vit(folder: Path, *, classes: int = 10) -> str:
    """Write a classifier of images of 8 x 8 with its preprocessing; return the folder's name as a model."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=classes)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    return f"hf:{folder}"
