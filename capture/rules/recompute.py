"""Random operators inside a region that activation checkpointing runs again."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.op_tensors import draws_numbers
from graphfsdp.base.hazards import HazardKind

_FILE = "torch/utils/checkpoint.py"
_RECOMPUTING = frozenset({"recompute_fn", "unpack_hook", "backward"})


def random_recompute(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Refusal | None:
    """Judge an operator that may run because a backward pass needs activations again.

    Args:
        op: The operator that is about to run.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Returns:
        A refusal if it draws random numbers: those of the forward pass were others.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return None  # most are none of these
    if (
        torch._C._current_graph_task_id() == -1
        or not _recomputes()
        or not draws_numbers(op, args, kwargs)
    ):
        return None
    return Refusal(
        f"{op} draws random numbers while activations are recomputed, without the generator "
        "being set back (which a graph cannot do): the second draw differs from the first, so "
        "gradients are wrong while the loss looks right",
        "call graphfsdp.recompute in place of torch.utils.checkpoint; it draws nothing twice",
        HazardKind.RECOMPUTE,
    )


def _recomputes() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTING and code.co_filename.endswith(_FILE):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
