"""How much memory micro-batches take: an iteration of the unsharded model, run without numbers.

The model lies on the meta device, where nothing has memory. What its operators make is counted as
long as it lives. Whole weights and gradients of its units are counted beside that by rules: a unit
is gathered before an operator reads its weights, and the next one with it, the root's weights stay
from forward to backward, and while one unit's gradients are reduced the next one's are made.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphfsdp.base.op_tensors import OpCall, OperatorMode, flat_tensors, is_empty, storage_key
from graphfsdp.base.torch_internals import key_of
from graphfsdp.sharding.layout import BufferPlan


class Unit(NamedTuple):
    """A module that is sharded by itself."""

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    buffers: tuple[BufferPlan, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights while they are gathered."""
        return sum(whole_bytes(each, each.dtypes.compute) for each in self.buffers if each.sharded)

    @property
    def grad_bytes(self) -> int:
        """Bytes of whole gradients on their way to the main grads."""
        return sum(whole_bytes(each, each.dtypes.comm) for each in self.buffers if each.trainable)


def whole_bytes(buffer: BufferPlan, dtype: torch.dtype) -> int:
    """Return the bytes of all ranks' parts together, padding included."""
    return buffer.layout.total_numel * dtype.itemsize


class Activations(NamedTuple):
    saved_bytes: int  # what the forward pass leaves for the backward pass
    peak_bytes: int  # the most that lives at one time, whole weights and gradients included
    whole_bytes: int  # the most of whole weights and gradients alone
    num_kernels: int  # of one micro-batch, at least: operators that make or write something


def run_without_numbers(
    run: Callable[[], Tensor],
    units: Sequence[Unit],  # in the order of their forward passes, the root first
    stage: int,
    num_microbatches: int = 1,
) -> Activations:
    """``run`` is the forward pass of one micro-batch; ``stage`` is ZeRO's."""
    lives = Lives()
    iteration = _Iteration(units, stage, lives)
    saved_bytes = 0
    with _FusedKernels(), iteration, iteration.hooks():
        for left in reversed(range(min(num_microbatches, 2))):  # a third one is as the second
            iteration.reduces = left == 0 or stage >= 2
            iteration.num_kernels = 0
            iteration.begins_pass(ahead=1)
            loss = run()
            saved_bytes = lives.now()
            iteration.begins_pass(ahead=-1)
            loss.backward()
    peaks = lives.peak_bytes, iteration.peak_whole_bytes
    return Activations(saved_bytes, *peaks, iteration.num_kernels)


class Lives:
    """Adds up the bytes of storages that are still alive."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = 0
        self.peak_bytes = 0

    def now(self) -> int:
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in gone:
            self._total -= self._live.pop(key)[1]
        return self._total

    def add(self, storage: torch.UntypedStorage) -> None:
        if key_of(storage) not in self._live:
            self._live[key_of(storage)] = (StorageWeakRef(storage), storage.nbytes())
            self._total += storage.nbytes()
        if self._total > self.peak_bytes:  # else it is no new maximum, whatever has been freed
            self.peak_bytes = max(self.peak_bytes, self.now())


class _Iteration(OperatorMode):
    """Sees operators, and so which units are gathered, what is made, and which gradients wait."""

    def __init__(self, units: Sequence[Unit], stage: int, lives: Lives) -> None:
        super().__init__()
        self._units, self._stage, self._lives = units, stage, lives
        self._unit_of = {
            storage_key(param): index
            for index, unit in enumerate(units)
            for param in unit.parameters
        }
        self._awaited = [0] * len(units)  # parameters without a gradient yet, of each unit
        self._reducing = -1
        self.reduces = True
        self.num_kernels = 0
        self._ahead = 1  # to the unit that runs next; -1 in the backward pass
        self._begun: set[int] = set()  # units in this pass
        self._whole: dict[tuple[int, str], Tensor] = {}  # weights and gradients, without numbers
        self.peak_whole_bytes = 0

    def hooks(self) -> ExitStack:
        """Return a context with hooks on all units."""
        stack = ExitStack()
        for index, unit in enumerate(self._units):
            ran = unit.module.register_forward_hook(lambda *_, index=index: self._ran(index))
            stack.callback(ran.remove)
            for param in unit.parameters:
                has_gradient = param.register_post_accumulate_grad_hook(
                    lambda _, index=index: self._has_gradient(index)
                )
                stack.callback(has_gradient.remove)
        return stack

    def begins_pass(self, ahead: int) -> None:
        self._ahead = ahead
        self._begun.clear()

    def _hold(self, index: int, what: str, num_bytes: int) -> None:
        if (index, what) not in self._whole:
            whole = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            self._whole[index, what] = whole
            self._lives.add(whole.untyped_storage())
            now = sum(each.nbytes for each in self._whole.values())
            self.peak_whole_bytes = max(self.peak_whole_bytes, now)

    def on_op(self, call: OpCall) -> Any:
        given = set(map(storage_key, flat_tensors((*call.args, *call.kwargs.values()))))
        read = {self._unit_of[key] for key in given if key in self._unit_of}
        for index in read - self._begun if self._stage else ():
            self._begun.add(index)
            for each in (index, index + self._ahead):  # the next one's gather is overlapped
                if 0 <= each < len(self._units):
                    self._hold(each, "weights", self._units[each].weight_bytes)
        result = call.run()
        made = [each for each in flat_tensors([result]) if storage_key(each) not in given]
        for tensor in made:
            self._lives.add(tensor.untyped_storage())
        self.num_kernels += bool(made or call.written) and not is_empty(call.op)
        return result

    def _ran(self, index: int) -> None:
        if self._stage == 3 and index != 0:  # the root is kept for its backward
            self._whole.pop((index, "weights"), None)
        self._awaited[index] = len(self._units[index].parameters)

    def _has_gradient(self, index: int) -> None:
        self._awaited[index] -= 1
        if self._awaited[index]:
            return
        unit = self._units[index]
        if self._stage:  # all of a unit's are copied to its whole gradients together
            self._hold(index, "grads", unit.grad_bytes)
        for param in unit.parameters:
            param.grad = None
        if self._stage == 3:
            self._whole.pop((index, "weights"), None)
        if self.reduces:
            self._whole.pop((self._reducing, "grads"), None)  # that has been reduced meanwhile
            self._reducing = index
        if self.reduces and index == 0:  # the root is the last
            self._whole.pop((index, "grads"), None)


class _FusedKernels(TorchFunctionMode):
    """Where torch has one kernel on a GPU, and on the meta device what keeps far more.

    Attention keeps all scores there, and RMSNorm float32 copies of its input: LayerNorm is one
    kernel, and keeps as much as a fused RMSNorm but for one number of each row.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        if func is nn.functional.rms_norm:
            return nn.functional.layer_norm(args[0], args[1], (kwargs or {})["weight"])
        return func(*args, **(kwargs or {}))
