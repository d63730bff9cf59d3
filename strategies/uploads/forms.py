"""What a model takes and returns, found by trying it: its form makes one classifier of it, from examples to logits.

The library's examples are images [B, ch, H, W], rows [B, F, 1, 1] and texts [B, 1, 1, L]. Many models take rows as
[B, F], tokens as whole numbers [B, L], sequences as [B, L, D], or a dict; and return one logit, probabilities, or an
object with the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from inspect import signature
from typing import Any, cast

import torch
from torch import nn

from ..core.errors import OptionError
from ..core.facts import CLASSIFIER, MODEL_ERRORS, holds_images, kind_of
from ..core.outputs import logits_of
from ..core.seeds import generator, seeded_torch
from ..method import Job, ModelBuilder

# How a batch is given to the model -> in words.
INPUTS = {
    "examples": "",
    "rows": "rows [B, F]",
    "tokens": "tokens [B, L] of whole numbers",
    "sequences": "sequences [B, L, D], without a channel",
    "dict": "a dict of the batch under the usual names",
}
# How the logits are made of what it returns -> in words.
OUTPUTS = {
    "logits": "",
    "found": "logits that are read out of a larger output",
    "one-logit": "one logit z, read as the two logits [0, z]",
    "probability": "one probability p, read as the two logits [log(1 - p), log p]",
    "probabilities": "probabilities, read as logits by their logarithm",
    "sigmoids": "a probability per class, read as logits by log(p / (1 - p))",
}
IMAGE_NAMES = ("image", "images", "img", "pixel_values", "inputs", "input", "x", "features", "data")
TOKEN_NAMES = ("input_ids", "tokens", "text", "inputs", "input", "x")
SMALLEST = 1e-12  # a probability is at least this under a logarithm
PROBES = 8
SETTINGS = 4  # of the weights' signs: a logit leaves [0, 1] under one of them


@dataclass(frozen=True)
class Form:
    """What a model takes and returns.

    Attributes:
        inputs: A key of :data:`INPUTS`.
        outputs: A key of :data:`OUTPUTS`.
    """

    inputs: str = "examples"
    outputs: str = "logits"

    def __str__(self) -> str:
        """Return the form in words; empty for a plain classifier."""
        takes, returns = INPUTS[self.inputs], OUTPUTS[self.outputs]
        return " and ".join(filter(None, [takes and f"takes {takes}", returns and f"returns {returns}"]))

    def given(self, examples: torch.Tensor, model: nn.Module) -> Any:
        """Return a batch as a model takes it."""
        if self.inputs == "rows":
            return examples.flatten(1)
        if self.inputs == "tokens":
            return examples.flatten(1).long()
        if self.inputs == "sequences":
            return examples.flatten(1, 2)
        if self.inputs == "dict":
            if examples.shape[1:3] != (1, 1):
                return dict.fromkeys(IMAGE_NAMES, examples.flatten(1) if examples.shape[2:] == (1, 1) else examples)
            tokens = examples.flatten(1).long()
            return {**dict.fromkeys(TOKEN_NAMES, tokens), "attention_mask": attention_mask(tokens, model)}
        return examples

    def logits(self, output: Any) -> torch.Tensor:
        """Return the logits [B, C] in what the model returned."""
        import torch

        found = output if self.outputs == "logits" else logits_of(output)
        if self.outputs in ("one-logit", "probability"):
            found = found.reshape(-1, 1)
        if self.outputs == "one-logit":
            return torch.cat([torch.zeros_like(found), found], dim=1)
        if self.outputs == "probability":
            return torch.cat([1 - found, found], dim=1).clamp_min(SMALLEST).log()
        if self.outputs == "probabilities":
            return found.clamp_min(SMALLEST).log()
        return torch.logit(found, eps=1e-6) if self.outputs == "sigmoids" else found

    def adapt(self, module: nn.Module) -> nn.Module:
        """Give a module hooks that make a plain classifier of it; its layers and the names of its weights stay."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)
        return module

    def _before(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        taken = self.given(given[0], module)
        if (
            self.inputs == "tokens"
            and len(given) == 1  # else the caller gives a mask
            and _has_padding(module)
            and "attention_mask" in signature(module.forward).parameters
        ):
            named = {"attention_mask": attention_mask(taken, module), **named}
        return (taken, *given[1:]), named

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> torch.Tensor:
        return self.logits(output)


def attention_mask(tokens: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """Return 1 where tokens [B, L] are not the ``pad_token_id`` of a model's config, if it has one; else ones.

    A text of nothing else has ones too.
    """
    if not _has_padding(model):
        return tokens.new_ones(tokens.shape)
    mask: torch.Tensor = tokens != cast("Any", model).config.pad_token_id
    return (mask | ~mask.any(dim=1, keepdim=True)).to(tokens.dtype)


def _has_padding(model: nn.Module) -> bool:
    return getattr(getattr(model, "config", None), "pad_token_id", None) is not None


@dataclass(frozen=True)
class FormedBuilder:
    """Builds modules of another builder as plain classifiers."""

    build: ModelBuilder
    form: Form

    @property
    def __name__(self) -> str:
        """The name of the builder inside."""
        return getattr(self.build, "__name__", "model")

    def __call__(self) -> nn.Module:
        """Return a fresh module."""
        return self.form.adapt(self.build())


def formed_builders(job: Job) -> dict[str, ModelBuilder]:
    """Return the builders of a job's classifiers as those of plain classifiers; other kinds stay as they are.

    Raises:
        OptionError: A model takes no form of the examples, or its outputs are no logits.
    """
    found = dict(job.builders)
    for name, build in found.items():
        if kind_of(name) == CLASSIFIER and (form := find_form(name, build, job)) != Form():
            found[name] = FormedBuilder(build, form)
    return found


def unformed(build: ModelBuilder) -> ModelBuilder:
    """Return the builder that the user gave."""
    return build.build if isinstance(build, FormedBuilder) else build


def forms_of(builders: Mapping[str, ModelBuilder]) -> dict[str, Any]:
    """Return the forms among some builders as JSON values, by architecture; plain classifiers are left out."""
    return {name: {"form": asdict(build.form)} for name, build in builders.items() if isinstance(build, FormedBuilder)}


def with_forms(builders: Mapping[str, ModelBuilder], stored: Mapping[str, Any]) -> dict[str, ModelBuilder]:
    """Return builders in the forms that :func:`forms_of` returned; those that have one already keep it."""
    return {
        name: FormedBuilder(build, Form(**stored[name]["form"]))
        if "form" in stored.get(name, {}) and not isinstance(build, FormedBuilder)
        else build
        for name, build in builders.items()
    }


def find_form(name: str, build: ModelBuilder, job: Job) -> Form:
    """Return the form of a model, the first that fits.

    Outputs are taken for probabilities if they stay in [0, 1] for normal noise under several choices of the weights'
    signs and, where there are several, sum to one.

    Raises:
        OptionError: The model takes no form of the examples, or its outputs are no logits.
    """
    import torch

    with torch.inference_mode(False), torch.no_grad(), seeded_torch(job.seed, "form"):
        model = build().eval()
        found = _first_form(name, model, job)
        if found.outputs == "logits" and _returns_more_in_training(model, found, job):
            found = replace(found, outputs="found")
        kinds = {"one-logit": ("probability",)}.get(found.outputs, ("probabilities", "sigmoids"))
        bounded = _bounded(model, found, job)
        if bounded is None:
            return found
        return replace(found, outputs=kinds[0] if len(kinds) == 1 or bounded else kinds[1])


def _first_form(name: str, model: nn.Module, job: Job) -> Form:
    """Return the first form in which a model takes two examples and gives logits of the job's classes."""
    import torch

    shape, refused = job.input_shape, list[str]()
    blank, text = torch.zeros(2, *shape), shape[0] == 1 and shape[2] > 1 and not holds_images(shape)
    images = ("dict", "sequences")[: 1 + (shape[0] == 1)]
    others = ("tokens", "dict") if text else images if holds_images(shape) else ("rows", "dict")
    tries = [("examples", blank), *([("examples", blank.long())] if text else []), *((kind, blank) for kind in others)]
    for inputs, given in tries:
        form = Form(inputs)
        try:
            output = model(form.given(given, model))
        except MODEL_ERRORS as error:
            what = "images" if holds_images(shape) else "examples"
            kinds = {str(each.dtype) for each in model.parameters() if each.is_floating_point()} - {"torch.float32"}
            if kinds:
                refused.append(
                    f"model {name!r} has weights of {', '.join(sorted(kinds))}: must be float32, by .float()"
                )
            first = f"{' '.join(str(error).split())[:300]} (nor {', nor '.join(INPUTS[each] for each in others)})"
            refused.append(f"input_shape is {shape}, and model {name!r} does not take such {what}: {first}")
            continue
        try:
            return replace(form, outputs=_outputs(name, output, job))
        except OptionError as error:
            refused.insert(0, str(error))
    raise OptionError(refused[0])


def _returns_more_in_training(model: nn.Module, form: Form, job: Job) -> bool:
    """Return whether a model in training mode returns more than logits, as GoogLeNet does."""
    import torch

    try:
        output = model.train()(form.given(torch.zeros(2, *job.input_shape), model))
    except MODEL_ERRORS:  # what it takes in training mode is checked where it is trained
        return False
    finally:
        model.eval()
    return not isinstance(output, torch.Tensor)


def _outputs(name: str, output: Any, job: Job) -> str:
    """Return how logits are made of an output for two examples."""
    import torch

    try:
        found = logits_of(output)
    except TypeError as error:
        raise OptionError(f"model {name!r} {error}") from error
    if tuple(found.shape) == (2, job.num_classes):
        return "logits" if isinstance(output, torch.Tensor) else "found"
    one = tuple(found.shape) in ((2, 1), (2,))
    if one and job.num_classes == 2:
        return "one-logit"
    hint = "; a model with one output has num_classes=2" if one else ""
    raise OptionError(
        f"num_classes is {job.num_classes}, but model {name!r} maps 2 images of shape {job.input_shape} to "
        f"{list(found.shape)}: must be {[2, job.num_classes]}{hint}"
    )


def _bounded(model: nn.Module, form: Form, job: Job) -> bool | None:
    """Return whether outputs in [0, 1] sum to one; None if they leave [0, 1] under some choice of signs."""
    import torch

    draw, sums = generator(0, "form"), []
    probes = torch.randn(PROBES, *job.input_shape, generator=draw)
    for setting in range(SETTINGS):
        if setting:
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(3.0 if float(torch.rand(1, generator=draw)) < 0.5 else -3.0)
        given = probes.abs().long() % 2 if form.inputs == "tokens" else probes
        try:
            output = logits_of(model(form.given(given, model))).reshape(PROBES, -1).float()
        except MODEL_ERRORS:  # a text of whole numbers
            output = logits_of(model(form.given(given.abs().long() % 2, model))).reshape(PROBES, -1).float()
        if not bool(output.isfinite().all()):  # large weights may overflow; then they tell nothing
            break
        if not output.any() or not bool(((output >= 0) & (output <= 1)).all()):
            return None
        sums.append(bool(((output.sum(dim=1) - 1).abs() < 1e-4).all()))
    return None if not sums or (not sums[0] and len(sums) < SETTINGS) else all(sums)
