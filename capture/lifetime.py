"""Who may use a captured step, when, and where."""

import os
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphfsdp._capture.rules.watcher import is_watching_mode
from graphfsdp._capture.undo.copy_on_write import is_undo_mode
from graphfsdp.errors import NotCopyableError, PhaseError


class CallGate:
    """Lets one call at a time into a captured step, in the process that made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._pid = os.getpid()

    def enter(self, what: str) -> None:
        """PhaseError if another call is under way, or this is a forked child."""
        if self.is_elsewhere:
            raise PhaseError(
                f"the captured step of process {self._pid} was {what} in its forked child "
                f"{os.getpid()}; a graph belongs to the process that made it. Remedy: make the "
                "step in the process that trains, after the fork"
            )
        if not self._lock.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise PhaseError(
                    f"the captured step was {what} inside its own iteration. Remedy: loss_fn and "
                    "the model must not call the step"
                )
            raise PhaseError(
                f"the captured step was {what} on one thread while it runs on another; both would "
                "write the same inputs, gradients and weights. Remedy: one thread trains, or a "
                "lock around the call"
            )
        self._owner = threading.get_ident()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is another process than the one that made the step: a forked child."""
        return os.getpid() != self._pid

    def leave(self) -> None:
        self._owner = None
        self._lock.release()


def refuse_surroundings(device: torch.device, groups: Sequence[dist.ProcessGroup]) -> None:
    """Refuse a call in inference mode, in a capture, or with a destroyed process group."""
    if groups and any(group not in dist.distributed_c10d._world.pg_names for group in groups):
        raise PhaseError(
            "the captured step was called after destroy_process_group, and the model is sharded "
            "over a group that was destroyed. Remedy: step.close() first, then "
            "destroy_process_group(); for another group shard the model and capture anew"
        )
    if torch.is_inference_mode_enabled():
        raise PhaseError(
            "the captured step was called under torch.inference_mode, where nothing can be "
            "trained. Remedy: call it outside (torch.no_grad is fine)"
        )
    inside = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch._C._len_torch_dispatch_stack():
        modes = _get_current_dispatch_mode_stack()
        inside = inside or any(is_undo_mode(mode) or is_watching_mode(mode) for mode in modes)
    if inside:
        raise PhaseError(
            "the captured step was called inside the iteration of another one, or while a CUDA "
            "graph is captured; an iteration cannot hold another. Remedy: call the steps one "
            "after the other"
        )


def refuse_copy() -> NotCopyableError:
    return NotCopyableError(
        "a captured step cannot be pickled or copied: its graph is bound to the addresses of this "
        "model in this process. Remedy: save or copy the model and the optimizer "
        "(state_dict()), and capture the copy"
    )
