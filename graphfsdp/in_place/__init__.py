"""`graphfsdp.capture_in_place`: the loop stays as it is, and what can be captured of it is.

In parts: Note [A part] in ``part_graphs.py``. A program on top: it may import every package.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphfsdp.base.torch_internals import tree_leaves
from graphfsdp.errors import ConfigError
from graphfsdp.in_place.parts import Parts
from graphfsdp.preconditions import adopt_sharded_parameters, as_list, one_module

_Models = nn.Module | Sequence[nn.Module]
_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def capture_in_place(model: _Models, optimizer: _Optimizers, *, keep: str = "pays") -> Parts:
    """Capture a loop that stays as it is, as far as it can be captured and it pays.

    Call it before the train loop, which goes on calling model, loss, ``backward`` and
    ``optimizer.step()``. A model's call becomes a graph of its forward pass, if a graph can hold
    what it does; where it cannot, the modules in it are tried. torch's Adam, AdamW and SGD step on
    a CPU by an operator for each group. Loss, clipping, scaler, logging, and what no graph can
    hold, run as they are written, on tensors that are there. So nothing is ever refused, and losses
    and weights are bit for bit those of the loop without this line (docs/porting.md has the two
    exceptions: loops and functions that go backward within a backward pass). Each part is timed
    beside the same loop without it (32 iterations), and given up where that is as fast.

    ``graphfsdp.capture`` has the whole iteration in one graph, the optimizer included. It saves
    more, and asks for an iteration that a graph can hold.

    Args:
        model: The module, or several.
        optimizer: The optimizer, or several; of any class.
        keep: "pays", or "all": keep parts that are not faster than the loop, too, as a test of
            them does.

    Returns:
        What has ``report()`` and ``close()``; nobody need hold it.

    Raises:
        ConfigError: for arguments of other kinds, and for an optimizer that has stepped before
            ``fully_shard`` was called, whose step is an error.
    """
    if hasattr(model, "step") and not isinstance(model, nn.Module):
        raise ConfigError(
            f"capture_in_place takes modules, not a {type(model).__name__}. Remedy: "
            "graphfsdp.capture(schedule, optimizer), which captures pipelines"
        )
    if keep not in ("pays", "all"):
        raise ConfigError(f"keep must be 'pays' or 'all', got {keep!r}")
    together = one_module(model)
    models = as_list(model, "model")
    optimizers = [inner for each in as_list(optimizer, "optimizer") for inner in _inner(each)]
    for each in optimizers:
        if isinstance(each, torch.optim.Optimizer):
            adopt_sharded_parameters(together, each)
    return Parts(models, optimizers, keeps_all=keep == "all")


def _inner(optimizer: Any) -> list[Any]:
    """Return the optimizers without a wrapper, which decides when they step."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if isinstance(inner, torch.optim.Optimizer):
        return [inner]
    held = tree_leaves([*getattr(optimizer, "__dict__", {}).values()])
    found = [each for each in held if isinstance(each, torch.optim.Optimizer)]
    if not found and hasattr(optimizer, "__dict__") and callable(getattr(optimizer, "step", None)):
        found = [optimizer]  # that nobody has derived from torch's
    if not found:
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return found
