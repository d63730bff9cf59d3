"""Equal but faster forms of models that predict and are never trained.

Every rewriting needs the model's graph, which torch.fx traces from its forward pass. A model that cannot be traced
stays unchanged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from .pooling import lean_max_pool2d

# Tracing runs the model's own code on stand-ins for tensors, which may raise any of these.
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)
_NORMS: dict[type, type] = {nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
_RELUS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
_POOL_OPTIONS = ("stride", "padding", "dilation", "ceil_mode", "return_indices")


def simplified(model: nn.Module) -> nn.Module:
    """Return an equal model that needs less time and memory, for eval mode without gradients of weights.

    - Batch normalisation is folded into the convolution before it: equal up to rounding, about 1e-6 relative.
    - ReLU moves behind the max pooling that follows it, where fewer values are left: equal bit for bit.
    - Max pooling keeps little for the backward pass: equal bit for bit.

    Args:
        model: Set to eval mode; the result may share its layers.

    Returns:
        A ``torch.fx.GraphModule``; the model itself if no rewriting applies, it has hooks, or it cannot be traced.
    """
    graph_module = _read(model.eval())
    if graph_module is None:
        return model
    folded, pools = _fold_batchnorm(graph_module), _lean_pooling(graph_module)
    if not (folded or pools):
        return model
    _pool_before_relu(graph_module, pools)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return graph_module.eval()


def _read(model: nn.Module) -> fx.GraphModule | None:
    if any(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks for part in model.modules()):
        return None
    try:
        graph_module = fx.symbolic_trace(model)
    except _UNREADABLE:
        return None
    # A tensor made during the forward pass, such as noise, would become a constant of the graph.
    own = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers(remove_duplicate=False))}
    made = any(node.op == "get_attr" and node.target not in own for node in graph_module.graph.nodes)
    return None if made else graph_module


def _fold_batchnorm(model: fx.GraphModule) -> bool:
    """Fold every batch normalisation into a preceding convolution that nothing else uses; return whether one was."""
    calls = Counter(node.target for node in model.graph.nodes if node.op == "call_module")
    # Layers whose tensors the model also reads directly.
    opened = {node.target.rpartition(".")[0] for node in model.graph.nodes if node.op == "get_attr"}
    found = False
    for node in list(model.graph.nodes):
        before = node.all_input_nodes[0] if node.all_input_nodes else node
        conv = _layer(model, before, *_NORMS)
        norm = _layer(model, node, _NORMS[type(conv)]) if conv is not None else None
        if norm is None:
            continue
        alone = len(before.users) == calls[before.target] == calls[node.target] == 1
        if alone and not {before.target, node.target} & opened and norm.running_var is not None and not norm.training:
            parent, _, name = before.target.rpartition(".")
            setattr(model.get_submodule(parent), name, fuse_conv_bn_eval(conv, norm))
            node.replace_all_uses_with(before)
            model.graph.erase_node(node)
            found = True
    return found


def _lean_pooling(model: fx.GraphModule) -> list[fx.Node]:
    """Replace every two-dimensional max pooling by :func:`.pooling.lean_max_pool2d`; return the new nodes."""
    new = []
    for node in list(model.graph.nodes):
        pool = _layer(model, node, nn.MaxPool2d)
        if pool is not None:
            size, options = pool.kernel_size, {name: getattr(pool, name) for name in _POOL_OPTIONS}
        elif node.target is F.max_pool2d:
            size, options = node.args[1], dict(node.kwargs)  # torch normalises the arguments of every call
        else:
            continue
        if not options.pop("return_indices"):
            with model.graph.inserting_after(node):
                new.append(model.graph.call_function(lean_max_pool2d, (node.args[0], size), options))
            node.replace_all_uses_with(new[-1])
            model.graph.erase_node(node)
    return new


def _pool_before_relu(model: fx.GraphModule, pools: list[fx.Node]) -> None:
    """Swap every ReLU with the pooling that is its only user."""
    for pool in pools:
        relu = pool.all_input_nodes[0]
        function = relu.target if relu.op in ("call_function", "call_method") else None
        # An in-place ReLU also changes its input for the input's other users.
        if (function in _RELUS or _layer(model, relu, nn.ReLU)) and len(relu.users) == 1:
            source = relu.all_input_nodes[0]
            if len(source.users) == 1:
                pool.replace_all_uses_with(relu)
                pool.replace_input_with(relu, source)
                relu.replace_input_with(source, pool)
                pool.append(relu)


def _layer(model: fx.GraphModule, node: fx.Node, *kinds: type[nn.Module]) -> Any:
    """Return the layer that a node calls on one input if its type is exactly one of these, else None."""
    if node.op != "call_module" or len(node.all_input_nodes) != 1:
        return None
    layer = model.get_submodule(str(node.target))
    return layer if type(layer) in kinds else None
