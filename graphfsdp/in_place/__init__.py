"""`graphfsdp.capture_in_place`: the loop stays as it is, and what can be captured of it is.

By default in parts (Note [A part] in ``part_graphs.py``), with ``whole=True`` each iteration as one
graph (Note [Put off] in ``region.py``). A program on top: it may import every package.
"""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from graphfsdp.errors import ConfigError
from graphfsdp.in_place.loop import InPlace
from graphfsdp.in_place.parts import Parts
from graphfsdp.preconditions import as_list, one_module

_Models = nn.Module | Sequence[nn.Module]
_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_OF_WHOLE = ("warmup_steps", "max_graphs", "verify", "backend", "compile")


@overload
def capture_in_place(
    model: _Models, optimizer: _Optimizers, *, keep: str = "pays", whole: Literal[False] = False
) -> Parts: ...
@overload
def capture_in_place(
    model: _Models, optimizer: _Optimizers, *, whole: Literal[True], **options: Any
) -> InPlace: ...
def capture_in_place(
    model: _Models,
    optimizer: _Optimizers,
    *,
    keep: str = "pays",
    whole: bool = False,
    **options: Any,
) -> Parts | InPlace:
    """Capture a loop that stays as it is, as far as it can be captured and it pays.

    Call it before the train loop, which goes on calling model, loss, ``backward`` and
    ``optimizer.step()``. A model's call becomes a graph of its forward pass, if a graph can hold
    what it does; where it cannot, the modules in it are tried. torch's Adam, AdamW and SGD step on
    a CPU by an operator for each group. Loss, clipping, scaler, logging, and what no graph can
    hold, run as they are written, on tensors that are there. So nothing is ever refused, and losses
    and weights are bit for bit those of the loop without this line. Each part is timed beside the
    same loop without it (32 iterations), and given up where that is as fast.

    ``graphfsdp.capture`` has the whole iteration in one graph, the optimizer included. It saves
    more, and asks for an iteration that a graph can hold.

    Args:
        model: The module, or several.
        optimizer: The optimizer, or several; of any class.
        keep: "pays", or "all": keep parts that are not faster than the loop, too, as a test of
            them does.
        whole: Capture all between the first call of a model in train mode and the last optimizer's
            step as one graph, which ``optimizer.step()`` launches. Python between these calls goes
            on running, but may not look at what the model returns, the loss or a gradient before
            the step: else a CaptureError says so, with a remedy.
        **options: With ``whole=True``: ``warmup_steps``, ``max_graphs``, ``verify``, ``backend``,
            ``compile`` of ``graphfsdp.capture``.

    Returns:
        What has ``report()`` and ``close()``; nobody need hold it.

    Raises:
        ConfigError: for arguments of other kinds; with ``whole=True`` as ``graphfsdp.capture``.
    """
    if hasattr(model, "step") and not isinstance(model, nn.Module):
        raise ConfigError(
            f"capture_in_place takes modules, not a {type(model).__name__}. Remedy: "
            "graphfsdp.capture(schedule, optimizer), which captures pipelines"
        )
    if keep not in ("pays", "all"):
        raise ConfigError(f"keep must be 'pays' or 'all', got {keep!r}")
    other = next((name for name in options if not whole or name not in _OF_WHOLE), None)
    if other is not None:
        raise ConfigError(
            f"capture_in_place takes keep and whole, and with whole=True {', '.join(_OF_WHOLE)}, "
            f"not {other!r}: the loop itself says what an iteration does. Remedy: leave it out, "
            f"{'whole=True, ' if other in _OF_WHOLE else ''}or graphfsdp.capture"
        )
    one_module(model)
    models, optimizers = as_list(model, "model"), as_list(optimizer, "optimizer")
    if not whole:
        return Parts(models, list(map(_inner, optimizers)), keeps_all=keep == "all")
    on_gpu = next(one_module(model).parameters()).is_cuda
    if options.get("compile") and on_gpu:
        raise ConfigError(
            "on a GPU compile= replaces the models' calls, and so does capture_in_place. Remedy: "
            "graphfsdp.capture(..., compile=True)"
        )
    loop = InPlace(models, optimizers, options)
    loop.install()
    return loop


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer without wrappers, which decide when it steps."""
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return inner
