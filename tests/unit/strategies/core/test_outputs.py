"""What models return, read as logits by one rule."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.outputs import logits_of, return_logits

LOGITS, OTHER = torch.arange(6.0).reshape(2, 3), torch.zeros(2, 3)
Aux = namedtuple("Aux", ["logits", "aux_logits2", "aux_logits1"])


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, OTHER),
        [LOGITS],
        ((LOGITS, OTHER), OTHER),
        Aux(LOGITS, OTHER, None),
        Answer(None, LOGITS),
        SimpleNamespace(hidden_states=OTHER, logits=LOGITS),
        {"loss": OTHER, "logits": LOGITS},
        OrderedDict(aux=OTHER, out=LOGITS),
        {"head": LOGITS},
        {"logits": (LOGITS, OTHER)},
    ],
)
def test_logits_are_found_in_what_models_return(output: Any) -> None:
    assert logits_of(output) is LOGITS


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (None, "nothing"),
        ((), "a tuple of nothing"),
        ("text", "a str"),
        ({"a": OTHER, "b": OTHER}, "a dict of a, b"),
        (("x", OTHER), "a tuple of str, Tensor"),
    ],
)
def test_other_outputs_are_named_with_the_rule(output: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"returns {found}: must return logits"):
        logits_of(output)


def test_an_output_that_holds_itself_ends() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(TypeError, match="must return logits"):
        logits_of(endless)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x), "aux": x}


def test_a_module_returns_logits_alone_also_as_a_copy() -> None:
    bare, module = TwoHeads(), return_logits(return_logits(TwoHeads()))
    bare.load_state_dict(module.state_dict())
    x = torch.randn(2, 4)
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301  its own bytes
        assert torch.equal(each(x), bare(x)["logits"])
        assert list(each.state_dict()) == list(bare.state_dict())
        assert len(each._forward_hooks) == 1
