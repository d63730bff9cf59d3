"""Former options that are constants now, for stored runs that still name them.

A run made with the constant's value is replayed and resumed as before. A run made with another value is refused,
because no code follows that value any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import OptionError
from ..core.options import Scalar

_POOLED = ("f-dafl", "f-adi", "intactofl", "fedhydra")
_GENERATED = ("dense", "co-boosting", "f-dafl", "intactofl", "fedhydra")
_BY_SGD = ("dense", "co-boosting", "fedhydra", "f-dafl", "f-adi")
_BY_ADAM = ("fedkd", "fed-et", "tally")


def _of(methods: tuple[str, ...], **fixed: Scalar) -> dict[str, Scalar]:
    return {f"{method}.{name.replace('_', '-')}": value for method in methods for name, value in fixed.items()}


# Setting -> its constant value.
RETIRED: Mapping[str, Scalar] = {
    **_of(("client",), ldam_margin=0.5, ldam_scale=30.0, mixup_weight=0.01, attack_step=0.002, attack_radius=0.5),
    **_of(("client",), kl_weight=1.0),
    **_of(("gatekeeper",), trigger_images=16, norm_ratio=3.0, logit_ratio=20.0, flat_ratio=0.1, copy_distance=0.05),
    **_of(("gatekeeper",), agreement=0.2, trigger_size=0.6, trigger_lead=0.7, trigger_transfer=0.1),
    **_of(("feddf", *_BY_SGD, *_BY_ADAM), momentum=0.9),
    **_of(_BY_SGD, optimizer="sgd"),
    **_of(_BY_ADAM, optimizer="adam", weight_decay=0.0, student_clip=0.0, steps_per_epoch=0),
    **_of(_BY_ADAM, teacher_precision="float32"),
    **_of(("fedkd", "fed-et"), schedule="constant"),
    **_of(_GENERATED, generator_reset=True),
    **_of(_POOLED, keep_images="best", pool_precision="uint8"),
    **_of(("f-dafl", "intactofl", "fedhydra"), optimize_noise=True),
    **_of(("co-boosting", "f-dafl", "intactofl", "fedhydra"), synthesis_augmentation="none"),
    **_of(("f-adi",), jitter=2, l2_weight=0.0, competition_temperature=3.0),
    **_of(("dense", "fedhydra", "intactofl"), ce_weight=1.0),
    **_of(("fedhydra",), distillation_data="pool"),
    **_of(("co-boosting",), perturbation_temperature=4.0, reweighting_images="all"),
    **_of(("tally",), schedule="one-cycle", inversion_steps=16, statistics="frozen"),
    **_of(("fed-gen",), ce_weight=1.0, distillation_weight=0.0, local_weight=10.0, local_decay=0.98),
    **_of(("fed-gen",), local_floor=1e-4, local_epochs=20),
    **_of(("iterative",), beta1=0.9, beta2=0.99, tau=0.001),
}


def without_retired(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the retired ones.

    Args:
        settings: By key, from a stored run or from a user.

    Raises:
        OptionError: A retired setting has another value than its constant.
    """
    for key, value in settings.items():
        if key in RETIRED and value != RETIRED[key]:
            raise OptionError(f"setting {key!r} is {value!r}: must be {RETIRED[key]!r}, which is fixed now")
    return {key: value for key, value in settings.items() if key not in RETIRED}
