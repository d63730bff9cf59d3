"""How the members of an ensemble are called: one after another, or several of one architecture together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from ..core.facts import MODEL_ERRORS
from .copies import can_deepcopy
from .frozen import lean_max_pool2d

# Several members of one architecture in one call: stacked, or with one first convolution.


# Measured with ten members: of six channels the joint convolution is eight times faster with the gradient to grey
# images, and 2.4 times to those of three channels; of eight it is as fast, of sixteen slower.
NARROW = 8

# The first images that try the stack, and by how much its answers may differ: bfloat16 rounds coarsely.
_TRIED, _TOLERANCE = 8, 0.2


class StackedMembers:
    """Some members of one architecture as one batched model, for a GPU, where launching small kernels takes the time.

    On a CPU it is slower than one member after another; on an H200 ten LeNet-5 are 2.2 to 3.7 times faster, ten CNN5
    1.7 to 2.5 times. The members' weights move into stacked tensors and the members keep views, so that memory holds
    each weight once.

    Some operations have no batched form, such as recurrent layers. The first images are therefore asked both ways,
    with the gradient to them; if the stack fails or differs, the members are called one after another from then on.

    Args:
        members: m :func:`can_stack` modules [B, ch, H, W] -> [B, C] that differ only in the values of their weights.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        self._members = list(members)
        self._works: bool | None = None
        self._skeleton = copy.deepcopy(members[0]).to("meta")
        states = [dict([*member.named_parameters(), *member.named_buffers()]) for member in members]
        self._state = {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}
        for name, stack in self._state.items():
            for state, values in zip(states, stack, strict=True):
                state[name].data = values

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [m, B, C] for images [B, ch, H, W]."""
        if self._works is None and len(x):
            self._works = _same(self._stacked, self._one_by_one, x[:_TRIED])
        return self._stacked(x) if self._works else self._one_by_one(x)

    def _one_by_one(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self._members])

    def _stacked(self, x: Tensor) -> Tensor:
        def one(state: dict[str, Tensor]) -> Tensor:
            logits: Tensor = functional_call(self._skeleton, state, (x,))
            return logits

        logits: Tensor = vmap(one)(self._state)
        return logits


def can_stack(member: nn.Module) -> bool:
    """Return whether a copy of a member without its weights is whole: weights are not tied, nor held by functions."""
    held = [
        id(tensor)
        for layer in member.modules()
        for tensors in (layer.named_parameters, layer.named_buffers)
        for _, tensor in tensors(recurse=False, remove_duplicate=False)
    ]
    return len(held) == len({*held}) and can_deepcopy(member)


def _same(stacked: Callable[[Tensor], Tensor], one_by_one: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return whether two forms of the same members run, and agree in logits and in the gradient to images."""
    try:
        # The caller may count or drop the tensors that its own backward pass needs: these are none of them.
        with torch.enable_grad(), saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
            found, expected = _answers(stacked, x), _answers(one_by_one, x)
    except MODEL_ERRORS:  # for example where code branches on a tensor's values
        return False
    return all(
        float((ours - theirs).norm()) <= _TOLERANCE * float(theirs.norm()) + 1e-6
        for ours, theirs in zip(found, expected, strict=True)
    )


def _answers(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    # Tokens are integers, which have no gradient.
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    logits = call(x).float()
    gradient = torch.autograd.grad(logits.square().sum(), x)[0] if logits.requires_grad else torch.zeros(())
    return logits.detach(), gradient


class NarrowMembers:
    """Some members of one architecture whose first layer is a narrow convolution, for a CPU.

    Convolution kernels work on eight or sixteen channels at a time. Six, as LeNet-5 has, leave most of each register
    empty, and the gradient to images of one channel is slower still. All members see the same images, so that their
    first layers are one convolution with the channels of all of them. That convolution, and the pooling and ReLU right
    after it, run once; the rest runs member by member. Logits and gradients equal the members' own up to rounding.

    Args:
        members: m traced modules [B, ch, H, W] -> [B, C] with a :func:`narrow_layer` that differ only in the values
            of their weights. Their first convolution is copied.
    """

    def __init__(self, members: Sequence[fx.GraphModule]) -> None:
        convolutions = [layer for layer in map(narrow_layer, members) if layer is not None]
        first = convolutions[0]
        weight = torch.cat([layer.weight.detach() for layer in convolutions])
        self._weight = weight.contiguous(memory_format=torch.channels_last)
        biases = [layer.bias.detach() for layer in convolutions if layer.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._window = first.stride, first.padding
        self._width = first.out_channels
        self._channelwise = _stem(members[0])
        self._rests = [_rest(member) for member in members]

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits [m, B, C] for images [B, ch, H, W]."""
        found: Tensor = _FrozenConvolution.apply(x, self._weight, self._bias, *self._window)  # type: ignore[no-untyped-call]
        parts = self._channelwise(found).split(self._width, dim=1)
        parts = [part.contiguous(memory_format=torch.channels_last) for part in parts]
        return torch.stack([rest(part) for rest, part in zip(self._rests, parts, strict=True)])


def narrow_layer(member: fx.GraphModule) -> nn.Conv2d | None:
    """Return a member's first layer if that is a convolution of fewer than :data:`NARROW` channels, else None."""
    users = list(_image(member.graph).users)
    layer = member.get_submodule(str(users[0].target)) if len(users) == 1 and users[0].op == "call_module" else None
    if type(layer) is not nn.Conv2d or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    plain = layer.groups == 1 and layer.dilation == (1, 1)
    return layer if plain and layer.out_channels < NARROW else None


class _FrozenConvolution(torch.autograd.Function):
    """A convolution with a gradient to its input alone, by a matrix product over the output's channels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.weight, ctx.window, ctx.size = weight, {"stride": stride, "padding": padding}, x.shape[2:]
        return F.conv2d(x, weight, bias, **ctx.window)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        # [B, channels, pixels], a view of channels-last memory; the product has the gradients of every window's pixels.
        windows = ctx.weight.flatten(1).T @ grads[0].flatten(2)
        return F.fold(windows, ctx.size, ctx.weight.shape[2:], **ctx.window), None, None, None, None


def _image(graph: fx.Graph) -> fx.Node:
    found: fx.Node = next(node for node in graph.nodes if node.op == "placeholder")
    return found


def _shared(member: fx.GraphModule) -> list[fx.Node]:
    """Return the first convolution of a member's graph, and what treats its channels one by one right after it."""
    found = list(_image(member.graph).users)
    while len(found[-1].users) == 1:
        (node,) = found[-1].users
        pools = node.target is lean_max_pool2d
        if not pools and not (node.op == "call_module" and type(member.get_submodule(str(node.target))) is nn.ReLU):
            break
        found.append(node)
    return found


def _stem(member: fx.GraphModule) -> fx.GraphModule:
    """Return what follows the first convolution channel by channel."""
    convolution, *others = _shared(member)
    return _part(member, convolution, others)


def _rest(member: fx.GraphModule) -> fx.GraphModule:
    """Return what comes after the shared layers, with the member's own weights."""
    shared = _shared(member)
    left_out = {_image(member.graph), *shared}
    return _part(member, shared[-1], [node for node in member.graph.nodes if node not in left_out])


def _part(member: fx.GraphModule, start: fx.Node, nodes: Sequence[fx.Node]) -> fx.GraphModule:
    """Return these nodes as a module of the value of ``start``; it returns the last one's value."""
    graph = fx.Graph()
    new = {start: graph.placeholder("x")}
    last = start
    for last in nodes:
        new[last] = graph.node_copy(last, new.__getitem__)
    if last.op != "output":
        graph.output(new[last])
    return fx.GraphModule(member, graph)


# Number of members whose activations are kept for the backward pass; those of the others are recomputed.
KEPT = 10

_RUNNING_AGAIN = ContextVar("running_again", default=False)

# Numbers of some members, and what returns their logits [m, B, C] for images [B, ch, H, W].
Call = tuple[Sequence[int], Callable[[Tensor], Tensor]]


def single_calls(members: Sequence[nn.Module]) -> list[Call]:
    """Return a call for every member."""
    return [_alone(number, member) for number, member in enumerate(members)]


def group_calls(members: Sequence[nn.Module], kinds: Sequence[str], *, stack: bool) -> list[Call]:
    """Return the calls that take the least time, each of at most :data:`KEPT` members.

    Args:
        members: The M members.
        kinds: The kind of each member [M]; members of one kind differ only in the values of their weights.
        stack: Stacks members of one kind that are :func:`can_stack`, and calls others one by one. Without it
            they share a narrow first layer if they have one, and are called one by one if not: on a CPU that beats
            every stacked form.
    """
    calls: list[Call] = []
    for numbers in _of_one_kind(kinds):
        group = [members[number] for number in numbers]
        traced = [member for member in group if isinstance(member, fx.GraphModule)]
        if stack and can_stack(group[0]):
            calls.append((numbers, StackedMembers(group)))
        elif not stack and len(traced) == len(group) > 1 and all(map(narrow_layer, traced)):
            calls.append((numbers, NarrowMembers(traced)))
        else:
            calls += [_alone(number, members[number]) for number in numbers]
    return calls


def evaluate_calls(calls: Sequence[Call], x: Tensor) -> Tensor:
    """Return all members' logits [M, B, C], in the order of their numbers.

    If a gradient is to flow to x, the first :data:`KEPT` members keep their activations.
    """
    backward = torch.is_grad_enabled() and x.requires_grad
    rows: dict[int, Tensor] = {}
    for numbers, call in calls:
        found = recompute_backward(call, x) if backward and len(rows) + len(numbers) > KEPT else call(x)
        rows.update(zip(numbers, found.unbind(), strict=True))
    return torch.stack([rows[number] for number in range(len(rows))])


def recompute_backward(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``forward(x)``, keeping only x for the backward pass.

    Values and gradients equal those of a plain call bit for bit. Hooks inside ``forward`` run twice; the second time
    :func:`running_again` is true.
    """
    result: Tensor = checkpoint(forward, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _second_run()))
    return result


def running_again() -> bool:
    """Return whether this is the second run of a :func:`recompute_backward` forward pass, whose results are discarded.

    In the second run a hook must repeat the differentiable arithmetic of the first, but store nothing.
    """
    return _RUNNING_AGAIN.get()


def _of_one_kind(kinds: Sequence[str]) -> Iterator[list[int]]:
    """Yield the numbers of members of one kind, at most :data:`KEPT` at a time."""
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        yield from (numbers[start : start + KEPT] for start in range(0, len(numbers), KEPT))


def _alone(number: int, member: nn.Module) -> Call:
    return [number], partial(_as_group, member)


def _as_group(member: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = member(x)
    return logits.unsqueeze(0)


@contextmanager
def _second_run() -> Iterator[None]:
    token = _RUNNING_AGAIN.set(True)
    try:
        yield
    finally:
        _RUNNING_AGAIN.reset(token)
