"""The base of optimizers that need whole tensors, not flat runs.

Shapes: G = groups; [...] a parameter's shape, or this rank's rows of it.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import _disable_current_modes

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.base.streams import is_capturing
from graphfsdp.errors import CaptureError
from graphfsdp.optim.fused.checks import check_gradient, check_parameter, parameter_name
from graphfsdp.optim.fused.control import StepControl
from graphfsdp.optim.fused.live_optimizer import LiveOptimizer
from graphfsdp.optim.fused.state import Loaded, Saved, State, load_groups, saved_tensor


class TensorMember(NamedTuple):
    param: Tensor  # maybe a DTensor
    weight: Tensor  # this rank's rows of it
    grad: Tensor | None  # None where another rank may have rows with one
    state: dict[str, Tensor]  # this rank's part
    row: int  # group, as row of the hyper-parameter table


class TensorOptimizer(LiveOptimizer):
    """An optimizer that steps parameter by parameter; subclasses say how."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults, StepControl())

    @abc.abstractmethod
    def _check_member(self, param: Tensor, group: Mapping[str, Any], name: str) -> None: ...

    @abc.abstractmethod
    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]: ...

    @abc.abstractmethod
    def _update(
        self,
        members: list[TensorMember],
        tables: Callable[[torch.device], Tensor],  # [G, 5] float64 each
        grad_scale: Tensor | None,  # [] float
    ) -> None: ...

    @property
    def skipped_steps(self) -> Tensor:
        """[] float32, steps that were skipped; its address stays after the first step."""
        return self._control.skipped_steps

    def _check_params(self, row: int) -> None:
        group = self.param_groups[row]
        for index, param in enumerate(group["params"]):
            name = parameter_name(self.param_groups)(row, index)
            check_parameter(local_part(param), name)
            self._check_member(param, group, name)

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take the step, and take it back if the flag is set."""
        members = self._members()
        self._hyper.copy_tensor_lrs(self.param_groups)
        if found_inf is None:
            self._update(members, self._hyper.on, grad_scale)
            return
        written = [
            tensor for member in members for tensor in (member.weight, *member.state.values())
        ]
        kept = [tensor.clone() for tensor in written]
        self._update(members, self._hyper.on, grad_scale)
        skip = found_inf != 0
        self._control.skipped_steps.add_(skip.to(self._control.skipped_steps.device))
        for tensor, before in zip(written, kept, strict=True):
            tensor.copy_(torch.where(skip.to(tensor.device), before, tensor))

    def _members(self) -> list[TensorMember]:
        """A sharded parameter without a gradient steps, too: another rank may have one."""
        found = []
        name_of = parameter_name(self.param_groups)
        for row, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                weight = local_part(param.detach())
                grad = None if param.grad is None else local_part(param.grad)
                if grad is None and not (is_dtensor(param) and param.requires_grad):
                    continue
                if grad is not None:
                    check_gradient(weight, grad, name_of(row, index))
                self._create(param, group)
                state = {key: local_part(value) for key, value in self.state[param].items()}
                found.append(TensorMember(param, weight, grad, state, row))
        return found

    def _create(self, param: Tensor, group: Mapping[str, Any]) -> None:
        if self.state.get(param):
            return
        if is_capturing():
            raise CaptureError(
                f"{type(self).__name__} has to make state, which is not possible inside a CUDA "
                "graph capture. Take at least one step before it (warmup_steps >= 1)"
            )
        # A recording must not hold it: it happens once.
        with torch.no_grad(), _disable_current_modes():
            self.state[param] = self._new_state(param, group)
            self._control.place(param.device)

    def _match_entries(self, saved: Saved) -> State:
        group = self.param_groups[saved.row]
        expected = self.state.get(saved.param) or self._new_state(saved.param, group)
        return {
            key: saved_tensor(saved.entries, key, tensor.shape, saved.name)
            for key, tensor in expected.items()
        }

    def load_states(self, loaded: Loaded) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                values = loaded.get(param)
                if values:
                    self._create(param, group)
                    for key, value in values.items():
                        self.state[param][key].copy_(value)

    def _load_numbers(self, state_dict: dict[str, Any]) -> None:
        load_groups(state_dict, self.param_groups, known_only=True)
