"""How much memory and arithmetic one micro-batch takes: by running it without numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from graphfsdp.base.op_tensors import OpCall, OperatorMode
from graphfsdp.base.torch_internals import key_of


@dataclass(frozen=True)
class Activations:
    saved_bytes: int  # what the forward pass leaves for the backward pass
    peak_bytes: int  # the most that lives at one time, over forward and backward


def measure_activations(model: nn.Module, run: Callable[[], Tensor]) -> Activations:
    """The model is on the meta device; gradients go at once, as in a unit that reduces."""
    lives = Lives()
    handles = [
        param.register_post_accumulate_grad_hook(_drop_gradient)
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        with _FusedKernels(), Watching(lives.add_made):
            loss = run()
            saved_bytes = lives.now()
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return Activations(saved_bytes, lives.peak_bytes)


def peak_of(run: Callable[[], object]) -> int:
    """Return how much, of what the operators of a run make, lives at one time."""
    lives = Lives()
    with _FusedKernels(), Watching(lives.add_made):
        run()
    return lives.peak_bytes


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


class Watching(OperatorMode):
    """Shows each operator that has run, its arguments and its result."""

    def __init__(self, see: Callable[[Any, Sequence[Any], Any], None]) -> None:
        super().__init__()
        self._see = see

    def on_op(self, call: OpCall) -> Any:
        result = call.run()
        self._see(call.op, (*call.args, *call.kwargs.values()), result)
        return result


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

    def add_made(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Add what an operator has returned that it was not given."""
        given = {key_of(storage) for storage in _storages(args)}
        for storage in _storages(result if isinstance(result, list | tuple) else (result,)):
            if key_of(storage) not in given:
                self.add(storage)


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of tensors, and of lists of them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _storages(value)
        elif isinstance(value, Tensor):
            yield value.untyped_storage()


class _FusedAttention(torch.autograd.Function):
    """Attention as a fused kernel sees it: scores are never in memory."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Positions before heads in memory, so that joining the heads copies nothing.
        shape = [*query.shape[:-1], value.shape[-1]]
        places = [*shape[:-3], shape[-2], shape[-3], shape[-1]] if len(shape) > 3 else shape
        out = query.new_empty(places)
        out = out.transpose(-3, -2) if len(shape) > 3 else out
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm as one kernel sees it: nothing of the input's size is kept but the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _FusedKernels(TorchFunctionMode):
    """Where torch has one kernel on a GPU, and on the meta device what keeps far more.

    Attention keeps all scores there, and RMSNorm float32 copies of its input.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return _FusedAttention.apply(*args[:3])  # type: ignore[no-untyped-call]
        weight = (kwargs or {}).get("weight")
        if func is nn.functional.rms_norm and weight is not None:
            return _FusedRMSNorm.apply(args[0], weight)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))
