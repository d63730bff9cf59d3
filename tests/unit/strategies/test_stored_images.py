from dataclasses import replace

import numpy as np
import pytest
import torch
from method_fakes import (
    PROXY,
    UPLOADS,
    softmax,
    tiny_job,
)
from torch import nn

from strategies.core.errors import OptionError
from strategies.core.facts import UploadFacts
from strategies.core.work import Work, count_work
from strategies.method import EnsembleSpec, Job, Normalization, Silent, Upload
from strategies.methods.distill import METHOD, DistillConfig, fit
from strategies.uploads.needs import check_needs

SMALL = DistillConfig(steps=5, batch_size=5, student_lr=0.1, optimizer="sgd", schedule="constant")


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3))


def test_the_first_step_is_the_one_computed_by_hand() -> None:
    rng = np.random.default_rng(0)
    weights, biases = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3))
    pixels = rng.uniform(size=(6, 4))
    states = [{"1.weight": torch.tensor(w), "1.bias": torch.tensor(b)} for w, b in zip(weights, biases, strict=True)]
    uploads = tuple(
        Upload(UploadFacts(f"c{k}", "linear", 10, None), lambda k=k: {n: v.float() for n, v in states[k].items()})  # type: ignore[misc]
        for k in range(2)
    )
    teacher = EnsembleSpec(("c0", "c1"), "weighted", {"weights": torch.tensor([0.75, 0.25])})
    images = torch.tensor(pixels, dtype=torch.float32).view(6, 1, 2, 2)
    config = replace(SMALL, steps=1, batch_size=6, student_lr=0.5, start="average", kd_temperature=2.0)
    space = Normalization((0.5,), (0.25,))
    job = Job(uploads, {"linear": linear}, "linear", 3, (1, 2, 2), space, config, proxy=images, teacher=teacher)

    student = fit(job, Silent()).student

    inputs = (pixels - 0.5) / 0.25
    wanted = softmax((inputs @ (0.75 * weights[0] + 0.25 * weights[1]).T + 0.75 * biases[0] + 0.25 * biases[1]) / 2)
    weight, bias = weights.mean(0), biases.mean(0)
    error = 2 * (softmax((inputs @ weight.T + bias) / 2) - wanted) / 6  # T^2 d/ds KL(p_T || q_T) = T (q_T - p_T)
    np.testing.assert_allclose(student["1.weight"], weight - 0.5 * error.T @ inputs, atol=1e-5)
    np.testing.assert_allclose(student["1.bias"], bias - 0.5 * error.sum(0), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_the_student_takes_the_steps_and_the_teacher_sees_each_image_once(steps: int) -> None:
    counts = Work()
    with count_work(counts):
        fit(tiny_job(replace(SMALL, steps=steps)), Silent())
    assert counts.as_dict() == {
        "teacher_forward": len(PROXY) * len(UPLOADS), "teacher_backward": 0, "student_steps": steps,
        "generator_steps": 0, "bfloat16_passes": 0, "bfloat16_steps": 0, "exchanges": 0,
    }  # fmt: skip


@pytest.mark.parametrize("proxy", [None, 2 * PROXY.float() / 255, -PROXY.float() / 255, PROXY.float() * torch.nan])
def test_job_without_images_or_with_numbers_that_are_no_pixels_is_refused(proxy: torch.Tensor | None) -> None:
    with pytest.raises(OptionError, match=r"'distill' needs that the server holds images without labels; .*\[0, 1\]"):
        check_needs(METHOD, replace(tiny_job(SMALL), proxy=proxy))
