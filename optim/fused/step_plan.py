"""The plan of a fused step: which tensors go into which call of the fused operation.

A plan is made when the set of gradients, their dtypes or an address changes, so in warm-up, and
is only followed afterwards.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.optim.fused.grad_norm import NormParts, norm_parts
from graphfsdp.optim.fused.step_batch import Member, collect, combination, make_batch
from graphfsdp.optim.fused.step_op import fused_adam_
from graphfsdp.optim.fused.step_settings import Flags
from graphfsdp.optim.fused.step_state import State


class Plan:
    """Batches of parameters, and the facts under which they hold."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        members: Sequence[Member],
        states: Iterable[State],
        hyper: Callable[[torch.device], Tensor],
    ) -> None:
        """Make the plan.

        Args:
            params: All parameters of the optimizer.
            grads: The gradient of each, or None.
            members: Those that have a gradient.
            states: The state of every parameter that has any.
            hyper: Gives the hyper-parameter table of a device.

        Capture: allocates and copies from the host: never inside a capture.
        """
        self._signature = _signature(grads)
        self._params = [local_part(param) for param in params]
        self._states = list(states)
        self._state_tensors = _values(self._states)
        combinations: dict[tuple[object, ...], list[Member]] = {}
        for member in members:
            combinations.setdefault(combination(member), []).append(member)
        self._batches = [
            make_batch(batch, hyper(batch[0].param.device)) for batch in combinations.values()
        ]
        # Addresses of gradients matter where something was derived from them.
        self._watch_grads = any(batch.tables or batch.merged for batch in self._batches)
        self._addresses = self._current_addresses(grads)

    def holds(self, grads: Sequence[Tensor | None], states: Iterable[State]) -> bool:
        """Return whether the plan still fits: gradients, addresses, and state tensors."""
        states = list(states)
        return (
            _signature(grads) == self._signature
            and self._current_addresses(grads) == self._addresses
            and _identical(states, self._states)
            and _identical(_values(states), self._state_tensors)
        )

    def run(
        self,
        grads: Sequence[Tensor | None],
        grad_scale: Tensor | None,  # [] float
        found_inf: Tensor | None,  # [] float
        skipped: Tensor,  # [] float32
        flags: Flags,
    ) -> None:
        """Take the step, or skip it.

        Capture: one operation per device and dtype combination; no host sync.
        """
        for index, batch in enumerate(self._batches):
            device = batch.hyper.device
            counts = index == 0 and found_inf is not None
            fused_adam_(
                *batch.columns._replace(grads=collect(batch, grads)),
                batch.steps,
                batch.hyper,
                *batch.lanes,
                _on(device, grad_scale),
                _on(device, found_inf),
                skipped if counts else None,
                batch.tables,
                None,  # whoever runs the recorded operation again may have memory for it
                0 if grad_scale is None else batch.scratch_bytes,
                batch.dense,
                *flags,
            )

    def norm_parts(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> NormParts:
        """Return the tensors whose norm is the gradients' norm: flat runs where there are such.

        Args:
            params: All parameters of the optimizer.
            grads: The gradient of each, or None.
        """
        parts = norm_parts(params, grads)
        if parts.sharded or any(batch.staged for batch in self._batches):
            return parts
        runs = [
            run
            for batch in self._batches
            for run in zip(batch.grad_indices, collect(batch, grads), strict=True)
        ]
        # Not in the order of addresses, in which sums would round otherwise from run to run.
        return NormParts([grad for _, grad in sorted(runs, key=operator.itemgetter(0))], {})

    @property
    def device(self) -> torch.device | None:
        """Where the first call of the operation runs; None where there is no call."""
        return self._batches[0].hyper.device if self._batches else None

    def _current_addresses(self, grads: Sequence[Tensor | None]) -> list[int]:
        addresses = [param.data_ptr() for param in self._params]
        if self._watch_grads:
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        return addresses


def _on(device: torch.device, scalar: Tensor | None) -> Tensor | None:
    if scalar is None or scalar.device == device:
        return scalar
    return scalar.to(device, non_blocking=True)


def _values(states: Sequence[State]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _identical(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def gradients_of(params: Sequence[Tensor], *, decoupled: bool) -> list[Tensor | None]:
    """Return the gradient that each parameter has now, this rank's part of a DTensor's.

    Args:
        decoupled: Read ``decoupled_grad`` instead of ``grad``.
    """
    if decoupled:
        grads = [getattr(param, "decoupled_grad", None) for param in params]
    else:
        grads = [param.grad for param in params]
    if any(map(is_dtensor, params)):
        return [None if grad is None else local_part(grad) for grad in grads]
    return grads


def local_state(state: Mapping[str, Tensor]) -> State:
    """Return one parameter's state with this rank's part of each DTensor."""
    return {key: local_part(value) for key, value in state.items()}


def _signature(grads: Sequence[Tensor | None]) -> list[object] | None:
    """Return what the batches depend on; None for gradients that no plan can be made for."""
    try:
        # Shapes follow: autograd keeps param.grad in the parameter's shape, and a decoupled
        # gradient of another shape but equal strides has another number of elements.
        return [
            None if grad is None else (grad.dtype, grad.stride(), grad.numel()) for grad in grads
        ]
    except RuntimeError:  # sparse tensors have no strides
        return None
