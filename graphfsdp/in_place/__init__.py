"""`graphfsdp.capture_in_place`: the loop stays as it is, and its iterations are replayed.

See Note [Put off] in ``region.py``. A program on top: it may import every package.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from graphfsdp.errors import ConfigError
from graphfsdp.in_place.loop import InPlace
from graphfsdp.preconditions import as_list, one_module


def capture_in_place(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    **options: Any,
) -> InPlace:
    """Capture the iterations of a loop that stays as it is.

    Call it before the train loop, which goes on calling model, loss, ``backward`` and
    ``optimizer.step()``. What lies between the first call of a model in train mode and the last
    optimizer's step becomes one graph, which ``optimizer.step()`` launches: the first iteration
    runs as written, three warm up (and train), the next one records, all later ones replay. Losses
    and weights are bit for bit those of the loop without this line; on a GPU those of the loop
    whose optimizer is ``capturable``, which a graph needs.

    Python between these calls goes on running. It may not look at what the model returns, the
    loss or a gradient before the step; all that is there behind it. Another way through, another
    number or another shape gets a graph of its own.

    Args:
        model: The module, or several; what the loop calls of modules that are not named here runs
            as ever, and only its results go into the graph.
        optimizer: As for ``graphfsdp.capture``; of several, each steps once in an iteration.
        **options: ``warmup_steps``, ``max_graphs``, ``verify``, ``backend``, ``compile`` of
            ``graphfsdp.capture``.

    Returns:
        What has ``report()`` and ``close()``; nobody need hold it.

    Raises:
        ConfigError: as ``graphfsdp.capture``, which the second iteration calls.
    """
    if hasattr(model, "step") and not isinstance(model, nn.Module):
        raise ConfigError(
            f"capture_in_place takes modules, not a {type(model).__name__}. Remedy: "
            "graphfsdp.capture(schedule, optimizer), which captures pipelines"
        )
    on_gpu = next(one_module(model).parameters()).is_cuda
    if options.get("compile") and on_gpu:
        raise ConfigError(
            "on a GPU compile= replaces the models' calls, and so does capture_in_place. Remedy: "
            "graphfsdp.capture(..., compile=True)"
        )
    known = ("warmup_steps", "max_graphs", "verify", "backend", "compile")
    other = next((name for name in options if name not in known), None)
    if other is not None:
        raise ConfigError(
            f"capture_in_place takes {', '.join(known)}, not {other!r}: the loop itself says what "
            "an iteration does. Remedy: leave it out, or graphfsdp.capture"
        )
    loop = InPlace(as_list(model, "model"), as_list(optimizer, "optimizer"), options)
    loop.install()
    return loop
