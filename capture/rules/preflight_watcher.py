"""A watcher that notes every hazard, goes on, and can undo what the iteration did."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.host_tensors import HostBorn
from graphfsdp._capture.rules.memory_sums import MemorySums
from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.rules.watcher import Run, Watcher
from graphfsdp._capture.trace.constant_log import ConstantLog
from graphfsdp._capture.trace.op_tensors import flat_tensors
from graphfsdp._capture.trace.storages import StorageInfo, has_storage
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp.base.hazards import HazardKind, HazardLog

_TRUSTED_NAMESPACES = ("aten", "prims", "graphfsdp", "_c10d_functional")


class PreflightWatcher(Watcher):
    """Watches one run of an iteration that is to leave no trace.

    Attributes:
        constants: The Python values that went into operators.
        undo: What was written outside the iteration, as it was before.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        hazards: HazardLog,
        *,
        for_cuda: bool,
        sums: MemorySums | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: Names the modules.
            device: Where it lies.
            hazards: Where every refusal is noted.
            for_cuda: Judge a run on a CPU by what a GPU would refuse.
            sums: Of the memory that must not change without an operator.
        """
        super().__init__(model, device, hazards=hazards)
        self.constants = ConstantLog()
        self.undo = CopyOnWrite()
        self._for_cuda = for_cuda
        self._sums = sums
        self._host_born: HostBorn | None = None
        if for_cuda and device.type == "cpu":
            self._host_born = HostBorn(self.storages)

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one that a capture does not permit."""
        if self._host_born is not None and not self._host_born.holds(tensor):
            return True
        return super().varies(tensor)

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Note a refusal, unless the rule is not one of the device that is aimed at."""
        # The kernels of a compiled region are recorded on CUDA like any others.
        if refusal.kind is not HazardKind.COMPILED or not self._for_cuda:
            super().refuse(op, refusal)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Judge a torch function called from Python, and run it."""
        if self._host_born is None or self.is_quiet:
            return super().on_function(function, args, kwargs)
        judged = self._host_born.judge_function(function, args, kwargs)
        if judged is not None:
            self.refuse(*judged)
        result = super().on_function(function, args, kwargs)
        self._host_born.note_function(function, args, kwargs, result)
        return result

    def judge_op(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        inputs: Sequence[Tensor],
    ) -> Refusal | None:
        """Return why a graph cannot hold an operator call, None if it can."""
        found = super().judge_op(op, args, kwargs, inputs)
        if found is None and self._host_born is not None:
            found = self._host_born.judge_op(op, inputs, super().varies)
        return found

    def on_op(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        written: Sequence[Tensor],
        run: Run,
    ) -> Any:
        """Keep what the operator is about to overwrite, and run it."""
        literal = self.is_literal(op)
        self.constants.add(op, args, kwargs, self.site, is_literal=literal)
        inputs = flat_tensors(args) + flat_tensors(kwargs.values())
        for tensor in inputs:
            if self._sums is not None and self._sums.has_changed(tensor):
                super().refuse(str(op), _hidden_write(tuple(tensor.shape)))
        trusted = op.namespace in _TRUSTED_NAMESPACES
        for tensor in written if trusted else inputs:
            info = self.storages.find(tensor, str(op)) if has_storage(tensor) else None
            if info is not None and info.external:
                self.undo.save(tensor)
        if torch.Tag.nondeterministic_seeded in op.tags or not trusted:
            self.undo.save_generators(args, kwargs)
        return run()

    def note_hidden_writes(self) -> None:
        """Note memory that was changed without an operator, after the last one that used it."""
        if self._sums is not None and self._sums.num_changed():
            super().refuse_at("(none)", _hidden_write(None), None, None)

    def note_results(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        infos: Sequence[StorageInfo],
        results: Sequence[Tensor],
    ) -> None:
        """Keep the book of storages, and of those in host memory."""
        super().note_results(op, args, infos, results)
        self.constants.add_results(args, {}, results)
        if self._host_born is not None:
            inputs = flat_tensors(args)
            self._host_born.note_op(inputs, results, is_literal=self.is_literal(op))


def _hidden_write(shape: tuple[int, ...] | None) -> Refusal:
    whose = "memory that it uses" if shape is None else f"the memory of a tensor of shape {shape}"
    return Refusal(
        f"the iteration changed {whose} without an operator (through a NumPy array or a C library "
        "that shares it); a replay runs operators only",
        "write with tensor operations (copy_, fill_), or pass the values as a tensor of the batch",
        HazardKind.HIDDEN_WRITE,
    )
