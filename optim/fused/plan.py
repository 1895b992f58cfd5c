"""The plan of a fused step: which tensors go into which call of the fused operation.

A plan is made when the set of gradients, their dtypes or an address changes, so in warm-up, and
is only followed afterwards.

Shapes: G = groups.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.base.memory import is_dense
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused import kernel
from graphfsdp.optim.fused.state import Flags, State, StepSettings, check_gradient, parameter_name
from graphfsdp.optim.fused.step import fused_adam_
from graphfsdp.optim.fused.update import (
    Columns,
    Dtypes,
    StepTensors,
    joined,
    make_columns,
    same_layout,
)


class Stepped(NamedTuple):
    position: int  # among all parameters of the optimizer
    row: int  # its group, as row of the hyper-parameter table
    param: Tensor
    grad: Tensor  # this rank's part


class Member(NamedTuple):
    """One parameter that takes the step; of a DTensor, this rank's part of everything."""

    position: int
    row: int  # its group, as row of the hyper-parameter table
    tensors: StepTensors
    step: Tensor  # [] float32
    dense: bool  # neither parameter nor gradient has gaps, and they are strided alike

    @property
    def numel(self) -> int:
        return self.tensors.param.numel()


@dataclass(frozen=True)
class Batch:
    """One call of the operation: all parameters of one device and dtype combination."""

    columns: Columns  # without gradients, which are new ones after every backward pass
    positions: list[int]  # of each parameter, and so its gradient, among all
    steps: list[Tensor]  # 1-D views of all step counts
    rows: list[int]
    counts: list[int]  # where the step count of each parameter is among all of ``steps``
    hyper: Tensor  # [G, 5] float64
    tables: list[Tensor]  # of the kernel, if it is used
    dense: bool  # see Member

    def collect(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [grad for index in self.positions if (grad := grads[index]) is not None]


class Plan:
    """Batches of parameters, and the facts under which they hold."""

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        stepped: Sequence[Stepped],
        states: Mapping[Tensor, State],
        hyper: Callable[[torch.device], Tensor],  # gives the hyper-parameter table of a device
    ) -> None:
        """Capture: allocates and copies from the host: never inside a capture."""
        self._signature = _signature(grads)
        self._params = [local_part(param) for param in params]
        self._states = list(states.values())
        self._state_tensors = _values(self._states)
        combinations: dict[tuple[object, ...], list[Member]] = {}
        for item in stepped:
            member = _member(item, local_state(states[item.param]))
            key = (member.tensors.param.device, _dtypes(member), member.dense)
            combinations.setdefault(key, []).append(member)
        self._batches = [
            _make_batch(members, hyper(members[0].tensors.param.device))
            for members in combinations.values()
        ]
        # Addresses of gradients matter where they are in a table.
        self._watch_grads = any(batch.tables for batch in self._batches)
        self._addresses = self._current_addresses(grads)

    def holds(self, grads: Sequence[Tensor | None], states: Iterable[State]) -> bool:
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
        """Capture: one operation per device and dtype combination; no host sync."""
        for index, batch in enumerate(self._batches):
            device = batch.hyper.device
            counts = index == 0 and found_inf is not None
            fused_adam_(
                *batch.columns._replace(grads=batch.collect(grads)),
                batch.steps,
                batch.hyper,
                batch.rows,
                batch.counts,
                _on(device, grad_scale),
                _on(device, found_inf),
                skipped if counts else None,
                batch.tables,
                batch.dense,
                *flags,
            )

    @property
    def device(self) -> torch.device | None:
        """Where the first call of the operation runs; None where there is no call."""
        return self._batches[0].hyper.device if self._batches else None

    def _current_addresses(self, grads: Sequence[Tensor | None]) -> list[int]:
        addresses = [param.data_ptr() for param in self._params]
        if self._watch_grads:
            addresses += [grad.data_ptr() for grad in grads if grad is not None]
        return addresses


def find_stepped(
    groups: Sequence[Mapping[str, Any]],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, State],
    settings: StepSettings,
) -> list[Stepped]:
    """Return the parameters with a gradient; refuse gradients and states that cannot be used."""
    name_of = parameter_name(groups)
    found = []
    index = 0
    for row, group in enumerate(groups):
        for position, param in enumerate(group["params"]):
            grad = grads[index]
            if grad is not None:
                name = name_of(row, position)
                check_gradient(local_part(param), grad, name)
                if states.get(param):
                    check_state(param, local_state(states[param]), name, settings)
                found.append(Stepped(index, row, param, grad))
            index += 1
    return found


def check_state(
    param: Tensor, state: Mapping[str, Tensor], name: str, settings: StepSettings
) -> None:
    local = local_part(param)
    dense = is_dense(local.shape, local.stride())
    like = local if dense else torch.empty_like(local, device="meta")
    for key, dtype in settings.state_dtypes(param).items():
        tensor = state.get(key)
        if (
            tensor is None
            or tensor.dtype != dtype
            or tensor.device != local.device
            or not same_layout(tensor, like)
        ):
            got = "missing"
            if tensor is not None:
                got = (
                    f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                    f"{tensor.dtype}, on {tensor.device}"
                )
            raise ConfigError(
                f"the state {key!r} of {name} is {got}; expected shape {tuple(like.shape)}, "
                f"strides {like.stride()}, {dtype}, on {local.device}. It does not fit the "
                "parameter any more: was the model moved or cast after the first step? "
                "load_state_dict copies values into the right places"
            )


def gradients_of(params: Sequence[Tensor], *, decoupled: bool) -> list[Tensor | None]:
    """Return the gradient that each parameter has now, this rank's part of a DTensor's."""
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


def _member(item: Stepped, state: State) -> Member:
    param = local_part(item.param)
    dense = is_dense(param.shape, param.stride()) and same_layout(param, item.grad)
    moments = state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq")
    tensors = StepTensors(param, item.grad, *moments, state.get("master_param"))
    return Member(item.position, item.row, tensors, state["step"], dense)


def _dtypes(member: Member) -> Dtypes:
    return make_columns([member.tensors]).dtypes()


def _make_batch(
    members: list[Member],  # of one device and dtype combination
    hyper: Tensor,  # [G, 5] float64
) -> Batch:
    steps, counts = joined([member.step for member in members])
    # Those without elements here count their steps, and no more.
    found = [(member, count) for member, count in zip(members, counts, strict=True) if member.numel]
    tensors = [member.tensors for member, _ in found]
    rows = [member.row for member, _ in found]
    tables: list[Tensor] = []
    if found and _uses_kernel(members[0]):
        own_steps = [member.step for member, _ in found]
        tables = list(kernel.make_tables(tensors, own_steps, rows, hyper.device))
    return Batch(
        columns=make_columns(tensors)._replace(grads=[]),
        positions=[member.position for member, _ in found],
        steps=steps,
        rows=rows,
        counts=[count for _, count in found],
        hyper=hyper,
        tables=tables,
        dense=members[0].dense,
    )


def _uses_kernel(member: Member) -> bool:
    return (
        _on_cuda(member.tensors.param)
        and member.dense
        and kernel.is_available()
        and kernel.supports(_dtypes(member))
    )


def _on_cuda(param: Tensor) -> bool:
    return param.is_cuda


def _on(device: torch.device, scalar: Tensor | None) -> Tensor | None:
    if scalar is None or scalar.device == device:
        return scalar
    return scalar.to(device, non_blocking=True)


def _values(states: Sequence[State]) -> list[Tensor]:
    return [tensor for state in states for tensor in state.values()]


def _identical(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _signature(grads: Sequence[Tensor | None]) -> list[object]:
    """Return what the batches depend on."""
    # Shapes follow: autograd keeps param.grad in the parameter's shape, and a decoupled gradient
    # of another shape but equal strides has another number of elements. Sparse ones have strides
    # of zeros.
    return [None if grad is None else (grad.dtype, grad.stride(), grad.numel()) for grad in grads]
