"""The base of optimizers that need whole tensors, not flat runs: live numbers, state in place.

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
from graphfsdp.base.recut import recut_states
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.optim.fused.hyper_table import HyperTable
from graphfsdp.optim.fused.rules import Rule
from graphfsdp.optim.fused.step_checks import (
    check_gradient,
    check_lr_device,
    check_parameter,
    refuse_copies,
)
from graphfsdp.optim.fused.step_members import parameter_name


class TensorMember(NamedTuple):
    """A parameter that takes the step.

    Attributes:
        param: The parameter itself, maybe a DTensor.
        weight: This rank's rows of it.
        grad: Its gradient; None where another rank may have rows with one.
        state: State tensors, this rank's part.
        row: Group, as row of the hyper-parameter table.
    """

    param: Tensor
    weight: Tensor
    grad: Tensor | None
    state: dict[str, Tensor]
    row: int


class TensorOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose numbers are live in a replay; subclasses say how a step is taken.

    ``param_groups`` hold ordinary Python numbers (lr may be a tensor), which ``step`` and every
    replay of a captured step read anew.
    """

    use_decoupled_grad = False

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        """Set up what subclasses share.

        Raises:
            ConfigError: a number is out of its range, or a parameter cannot be trained.
        """
        self._hyper = HyperTable(self._rule())
        self._skipped = torch.zeros(())
        super().__init__(params, defaults)

    @abc.abstractmethod
    def _rule(self) -> Rule:
        """Return what reads and checks the numbers of a group."""

    @abc.abstractmethod
    def _check_member(self, param: Tensor, group: Mapping[str, Any], name: str) -> None:
        """Refuse a parameter that the rule cannot step on.

        Raises:
            ConfigError: it is named.
        """

    @abc.abstractmethod
    def _new_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter that takes its first step."""

    @abc.abstractmethod
    def _update(
        self,
        members: list[TensorMember],
        tables: Callable[[torch.device], Tensor],  # [G, 5] float64 each
        grad_scale: Tensor | None,  # [] float
    ) -> None:
        """Take the step."""

    @property
    def skipped_steps(self) -> Tensor:
        """[] float32, steps that were skipped; its address stays after the first step."""
        return self._skipped

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the weight that is updated for ``param``."""
        return param.dtype

    def hyper_table(self, device: torch.device) -> Tensor:
        """Return the [groups, 5] float64 table that steps on a device read."""
        self._hyper.refresh(self.param_groups)
        return self._hyper.on(device)

    def upload_hyperparameters(self) -> None:
        """Copy the numbers in ``param_groups`` to the device where they changed.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: nothing is recorded. Call it before each replay.
        """
        self._hyper.refresh(self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a captured step must be captured again afterwards.

        Raises:
            ConfigError: as for the constructor.
        """
        super().add_param_group(param_group)
        row = len(self.param_groups) - 1
        group = self.param_groups[row]
        try:
            self._rule().check(group, row)
            check_lr_device(group, row)
            for index, param in enumerate(group["params"]):
                name = parameter_name(self.param_groups)(row, index)
                check_parameter(local_part(param), name)
                self._check_member(param, group, name)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._hyper.clear()

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,  # [] float, multiplies every gradient
        found_inf: Tensor | None = None,  # [] float, nothing is changed unless it is zero
    ) -> float | None:
        """Take one step with the gradients that are bound now; they are only read.

        Parameters without a gradient are skipped. A sharded one is not: another rank may have a
        gradient, so that it counts as zero here.

        Args:
            closure: Computes the loss anew and returns it.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigError: a gradient or a changed number cannot be used; it is named.
            CaptureError: a CUDA graph is being captured and a parameter has no state yet.

        Capture: no host sync. The first step must be taken outside a CUDA capture.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not _is_capturing():
            self.upload_hyperparameters()
        members = self._members()
        self._hyper.copy_tensor_lrs(self.param_groups)
        if found_inf is None:
            self._update(members, self._hyper.on, grad_scale)
        else:
            self._update_unless(found_inf, members, grad_scale)
        return loss

    def _update_unless(
        self, found_inf: Tensor, members: list[TensorMember], grad_scale: Tensor | None
    ) -> None:
        """Take the step, and take it back if the flag is set."""
        written = [
            tensor for member in members for tensor in (member.weight, *member.state.values())
        ]
        kept = [tensor.clone() for tensor in written]
        self._update(members, self._hyper.on, grad_scale)
        skip = found_inf != 0
        self._skipped.add_(skip.to(self._skipped.device))
        for tensor, before in zip(written, kept, strict=True):
            tensor.copy_(torch.where(skip.to(tensor.device), before, tensor))

    def _members(self) -> list[TensorMember]:
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
                if not self.state.get(param):
                    self._create(param, group)
                state = {key: local_part(value) for key, value in self.state[param].items()}
                found.append(TensorMember(param, weight, grad, state, row))
        return found

    def _create(self, param: Tensor, group: Mapping[str, Any]) -> None:
        if _is_capturing():
            raise CaptureError(
                f"{type(self).__name__} has to make state, which is not possible inside a CUDA "
                "graph capture. Take at least one step before it (warmup_steps >= 1)"
            )
        # A recording must not hold it: it happens once.
        with torch.no_grad(), _disable_current_modes():
            self.state[param] = self._new_state(param, group)
            self._skipped = self._skipped.to(param.device)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with ``control`` beside it: the number of skipped steps."""
        return {**super().state_dict(), "control": {"skipped_steps": self._skipped}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the tensors that exist: addresses and dtypes stay.

        Raises:
            ConfigError: groups or shapes do not fit; nothing has been changed then.
        """
        state_dict = recut_states(state_dict, self)
        saved_groups = state_dict["param_groups"]
        sizes = [[len(group["params"]) for group in g] for g in (self.param_groups, saved_groups)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the saved state has groups of {sizes[1]} parameters, this optimizer {sizes[0]}"
            )
        name_of = parameter_name(self.param_groups)
        loaded: list[tuple[Tensor, dict[str, Any], dict[str, Tensor]]] = []
        for row, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            for index, (param, key) in enumerate(
                zip(group["params"], saved["params"], strict=True)
            ):
                entries = state_dict["state"].get(key)
                if entries:
                    loaded.append(
                        (param, group, self._match(param, group, entries, name_of(row, index)))
                    )
        with torch.no_grad(), _disable_current_modes():
            for param, group, values in loaded:
                if not self.state.get(param):
                    self._create(param, group)
                for key, value in values.items():
                    self.state[param][key].copy_(value)
            if "control" in state_dict:
                self._skipped.copy_(state_dict["control"]["skipped_steps"])
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            self._load_numbers(group, saved)

    def _match(
        self, param: Tensor, group: dict[str, Any], entries: Mapping[str, Any], name: str
    ) -> dict[str, Tensor]:
        found = {}
        for key, tensor in (self.state.get(param) or self._new_state(param, group)).items():
            value = entries.get(key)
            if value is None or torch.as_tensor(value).shape != tensor.shape:
                got = (
                    "missing"
                    if value is None
                    else f"of shape {tuple(torch.as_tensor(value).shape)}"
                )
                raise ConfigError(
                    f"the saved {key!r} of {name} is {got}; expected {tuple(tensor.shape)}"
                )
            found[key] = torch.as_tensor(value)
        return found

    def _load_numbers(self, group: dict[str, Any], saved: Mapping[str, Any]) -> None:
        for key in group.keys() & saved.keys() - {"params", "param_names"}:
            value = saved[key]
            if isinstance(group[key], Tensor):
                with torch.no_grad():
                    group[key].copy_(torch.as_tensor(value))
            else:
                group[key] = value.item() if isinstance(value, Tensor) else value

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        refuse_copies(self.state)
        return {**super().__getstate__(), "_skipped": self._skipped.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        super().__setstate__(state)
        self._hyper = HyperTable(self._rule())


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
