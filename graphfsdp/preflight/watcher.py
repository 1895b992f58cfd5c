"""Watchers that note every hazard and go on, by the rules of the device that is aimed at."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.constants import ConstantLog
from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.values import StorageInfo
from graphfsdp._capture.undo.copy_on_write import CopyOnWrite
from graphfsdp.base.hazards import HazardKind, HazardLog
from graphfsdp.base.op_tensors import OpCall, flat_tensors, storage_key
from graphfsdp.preflight.host_tensors import HostTensors


class NotingWatcher(Watcher):
    """Notes what it would refuse.

    ``for_cuda``: also what only a GPU would refuse.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, hazards: HazardLog, *, for_cuda: bool
    ) -> None:
        super().__init__(model, device, hazards=hazards)
        self._for_cuda = for_cuda
        self._on_host: HostTensors | None = None
        if for_cuda and device.type == "cpu":
            self._on_host = HostTensors(self.storages)

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one that a capture does not permit."""
        if self._on_host is not None and not self._on_host.holds(tensor):
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
        if self._on_host is None or self.is_quiet:
            return super().on_function(function, args, kwargs)
        judged = self._on_host.judge_function(function, args, kwargs)
        if judged is not None:
            self.refuse(*judged)
        result = super().on_function(function, args, kwargs)
        self._on_host.note_function(function, args, kwargs, result)
        return result

    def judge_op(self, call: OpCall) -> Refusal | None:
        found = super().judge_op(call)
        if found is None and self._on_host is not None:
            found = self._on_host.judge_op(call, super().varies)
        return found

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if self._on_host is not None:
            self._on_host.note_op(call, flat_tensors([result]))


class PreflightWatcher(NotingWatcher):
    """Watches one run of an iteration that is to leave no trace.

    ``constants`` are Python values that went into operators; ``undo`` is what was overwritten.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        hazards: HazardLog,
        *,
        for_cuda: bool,
        sums: "MemorySums | None" = None,  # of what must not change without an operator
    ) -> None:
        super().__init__(model, device, hazards, for_cuda=for_cuda)
        self.constants = ConstantLog()
        self.undo = CopyOnWrite()
        self._sums = sums

    def on_op(self, call: OpCall) -> Any:
        self.constants.add(call, call.keys, self.site)
        for tensor in call.tensors:
            if self._sums is not None and self._sums.has_changed(tensor):
                whose = f"the memory of a tensor of shape {tuple(tensor.shape)}"
                super().refuse(call.name, _HIDDEN_WRITE.of(whose))
        for tensor in call.may_write():
            info = self.storages.get(storage_key(tensor))
            if info is not None and info.external:
                self.undo.save(tensor)
        self.undo.save_generators(call)
        return call.run()

    def note_hidden_writes(self) -> None:
        """Note memory that was changed without an operator, after the last one that used it."""
        if self._sums is not None and self._sums.num_changed():
            super().refuse_at("(none)", _HIDDEN_WRITE.of("memory that it uses"), None, None)

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        self.constants.add_results(call, result)


class MemorySums:
    """What the memory of tensors from outside an iteration held when the iteration began.

    An array of NumPy, or a C library, may share it and write to it.
    """

    def __init__(self, storages: Iterable[StorageInfo]) -> None:
        """Add up every storage from outside that is alive, of those that an earlier run has met."""
        self._infos = {info.ref.cdata: info for info in storages if info.external and info.alive}
        self._sums = {key: _sum(info.get()) for key, info in self._infos.items()}

    def has_changed(self, tensor: Tensor) -> bool:
        """Tell whether a tensor's memory has changed; later calls for the same memory say no."""
        before = self._sums.pop(storage_key(tensor), None)
        return before is not None and before != _sum(tensor.untyped_storage())

    def num_changed(self) -> int:
        """Return how many storages that nobody has asked for have changed."""
        left = [(self._infos[key], before) for key, before in self._sums.items()]
        return sum(info.alive and _sum(info.get()) != before for info, before in left)


def _sum(storage: torch.UntypedStorage) -> tuple[int, int]:
    whole = storage.nbytes() // 4 * 4
    contents = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    numbers = contents[:whole].view(torch.int32)
    return int(numbers.sum(dtype=torch.int64)), int(contents[whole:].sum(dtype=torch.int64))


_HIDDEN_WRITE = Refusal(
    "the iteration changed {} without an operator (through a NumPy array or a C library that "
    "shares it); a replay runs operators only",
    "write with tensor operations (copy_, fill_), or pass the values as a tensor of the batch",
    HazardKind.HIDDEN_WRITE,
)
