"""What all optimizers of ours share: numbers that are live in replays, and loading in place.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

import abc
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.base.dtensors import local_part, recut_states
from graphfsdp.base.norms import HeldByGroups, clip_coefficient, global_norm
from graphfsdp.base.streams import is_capturing
from graphfsdp.base.torch_internals import without_modes
from graphfsdp.errors import CaptureError, ConfigError, NotCopyableError
from graphfsdp.optim.fused.state import (
    Loaded,
    Saved,
    State,
    check_parameter,
    copy_states,
    load_groups,
    parameter_name,
)

HYPER_COLUMNS = ("lr", "beta1", "beta2", "eps", "weight_decay")

# A row of the table: lr, the numbers of the first and of the second
# moment, eps, weight decay. What an optimizer has no use for is zero.
Row = tuple[float, float, float, float, float]


@dataclass(frozen=True)
class Rule:
    """How the numbers of a group are read and checked."""

    read: Callable[[Mapping[str, Any]], Row]
    check: Callable[[Mapping[str, Any], int], None]  # refuses numbers of a group, given its index


def _read_betas(group: Mapping[str, Any]) -> Row:
    beta1, beta2 = group["betas"]
    return group["lr"], beta1, beta2, group["eps"], group["weight_decay"]


def check_betas(group: Mapping[str, Any], row: int) -> None:
    where = f"of parameter group {row}"
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"betas {where} must be a pair of numbers, got {betas!r}")
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, where, below_one=True)
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, group[name], where)


def check_number(name: str, value: object, where: str, *, below_one: bool = False) -> None:
    """Refuse what is no finite number of at least 0, and optionally below 1."""
    # A tensor would be read on the host here, and frozen. Floats are known by their class: to ask
    # an abstract one takes longer, and a schedule asks each time.
    is_number = isinstance(value, (float, int, numbers.Real))
    if not is_number or not 0 <= value < (1 if below_one else math.inf):  # type: ignore[operator]
        expected = "a number in [0, 1)" if below_one else "a finite number of at least 0"
        remedy = ". Remedy: a number, which stays live" if isinstance(value, Tensor) else ""
        raise ConfigError(f"{name} {where} must be {expected}, got {value!r}{remedy}")


ADAM = Rule(_read_betas, check_betas)


class LiveMemory:
    """Numbers of Python in memory that kernels read: what is written there, replays see.

    On a CPU it is the host's memory itself: writing it is no operation that a recording could see
    and replay. To other devices it is copied; on CUDA the driver stages the copy from pageable
    memory, so that the host's may be written again at once.

    Attributes:
        host: [...] float64, the numbers.
    """

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """``dtype`` is that of other devices than a CPU."""
        self.host = np.zeros(shape)
        self._dtype = dtype
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on a device, [...]; the address stays."""
        if device not in self._copies:
            with torch.no_grad(), without_modes():
                host = torch.from_numpy(self.host)
                on_cpu = device.type == "cpu"
                self._copies[device] = host if on_cpu else host.to(device, self._dtype)
        return self._copies[device]

    def upload(self) -> None:
        """Copy what was written to the devices. Capture: nothing is recorded."""
        for device, copy in self._copies.items():
            if device.type != "cpu":
                with torch.no_grad(), without_modes():
                    copy.copy_(torch.from_numpy(self.host), non_blocking=True)


class HyperTable:
    """One float64 row per group (see ``HYPER_COLUMNS``), on every device that has parameters.

    Python numbers are compared with what was uploaded and copied only where they changed.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._rows: list[Row] = []
        self._memory = LiveMemory(0, len(HYPER_COLUMNS))

    def on(self, device: torch.device) -> Tensor:
        """Return the [G, 5] float64 table on a device; its address stays until a group is added."""
        return self._memory.on(device)

    def refresh(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy the Python numbers to the devices where they changed; make the tables if need be.

        Capture: nothing is recorded; called before each replay.
        """
        rows = list(map(self._rule.read, groups))
        if rows != self._rows:
            self._upload(groups, rows)

    def _upload(self, groups: Sequence[Mapping[str, Any]], rows: list[Row]) -> None:
        for index, group in enumerate(groups):
            self._rule.check(group, index)
        if len(self._memory.host) != len(groups):
            self._memory = LiveMemory(len(groups), len(HYPER_COLUMNS))
        self._memory.host[:] = rows
        self._memory.upload()
        self._rows = rows


class StepControl:
    """Device scalars around the fused operation; none of them is read on the host.

    ``skipped_steps`` ([] float32) keeps its address after the first step. ``grad_norm`` ([]
    float32) is of the unscaled gradients in the last step that needed it.
    """

    def __init__(self, skip_nonfinite: bool = False, max_grad_norm: float | None = None) -> None:
        """Make the scalars on the CPU; ``place`` moves them."""
        self._skip_nonfinite = skip_nonfinite
        self._max_grad_norm = max_grad_norm
        self.skipped_steps = torch.zeros((), device="cpu")
        self.grad_norm = torch.zeros((), device="cpu")

    def place(self, device: torch.device | None) -> None:
        """Move to where the first parameters are. Capture: never inside, copies from the host."""
        if device is not None and self.skipped_steps.device != device:
            self.skipped_steps = self.skipped_steps.to(device)
            self.grad_norm = self.grad_norm.to(device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "number of skipped steps", self.skipped_steps
        yield "gradient norm", self.grad_norm

    def restart(self) -> None:
        """Forget the steps that were taken, in place."""
        self.skipped_steps.zero_()
        self.grad_norm.zero_()

    def needs_norm(self, found_inf: Tensor | None) -> bool:
        checks = self._skip_nonfinite and found_inf is None
        return checks or self._max_grad_norm is not None

    def prepare(
        self,
        parts: HeldByGroups | None,  # the gradients, where needs_norm says so
        grad_scale: Tensor | None,  # [] float
        found_inf: Tensor | None,  # [] float
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what multiplies every gradient, and whether to skip, of this step.

        Capture: no host sync; one collective for each group of ranks that shares gradients.
        """
        if parts is None:
            return grad_scale, found_inf
        norm = global_norm(parts, self.grad_norm.device)
        if found_inf is None and self._skip_nonfinite:
            found_inf = norm.isfinite().logical_not_().to(torch.float32)
        if grad_scale is not None:
            norm = norm * grad_scale
        self.grad_norm.copy_(norm)
        if self._max_grad_norm is not None:
            coefficient = clip_coefficient(norm, self._max_grad_norm)
            grad_scale = coefficient if grad_scale is None else grad_scale * coefficient
        return grad_scale, found_inf

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy into what exists, so that a captured step goes on."""
        self.skipped_steps.copy_(state_dict["skipped_steps"])


class LiveOptimizer(torch.optim.Optimizer, abc.ABC):
    """An optimizer whose numbers and decisions are on the device.

    ``param_groups`` hold ordinary Python numbers. They may be changed at any time, by hand or by a
    scheduler: ``step`` and every replay of a captured step read them anew.
    """

    _rule: ClassVar[Rule] = ADAM  # what reads and checks the numbers of a group

    def __init__(self, params: ParamsT, defaults: dict[str, Any], control: StepControl) -> None:
        self._control = control
        self._hyper = HyperTable(self._rule)
        super().__init__(params, defaults)

    def _check_params(self, row: int) -> None:
        name_of = parameter_name(self.param_groups)
        for index, param in enumerate(self.param_groups[row]["params"]):
            check_parameter(local_part(param), name_of(row, index))

    @abc.abstractmethod
    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None: ...

    @abc.abstractmethod
    def _match_entries(self, saved: Saved) -> State:
        """Return what the state of a parameter is to become; ConfigError: it does not fit."""

    def _check_saved(self, saved: Mapping[str, Any], row: int) -> None:
        """Refuse a group that was saved by an optimizer of another rule."""
        return

    @abc.abstractmethod
    def _new_states(self, params: Sequence[Tensor]) -> dict[Tensor, State]:
        """Make the state with which parameters begin."""

    def create_missing(self, params: Iterable[Tensor]) -> None:
        """Capture: allocates, and copies from the host: never inside a capture."""
        wanted = [param for param in params if not self.state.get(param)]
        # Host work that a recording must not hold: it happens once.
        with torch.no_grad(), without_modes():
            self.state.update(self._new_states(wanted))
            self._control.place(wanted[0].device if wanted else None)

    def _refuse_in_capture(self) -> None:
        if is_capturing():
            raise CaptureError(
                f"{type(self).__name__} has to make state or address tables, which is not possible "
                "inside a CUDA graph capture. Take at least one step with the same gradient "
                "tensors before the capture (warmup_steps >= 1), and keep their addresses"
            )

    @torch.no_grad()
    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give state the values with which it begins."""
        for param, fresh in self._new_states(list(states)).items():
            for key, value in fresh.items():
                states[param][key].copy_(value)
        if len(states) == len(self.state):  # no step was taken before
            self._control.restart()

    @property
    def use_decoupled_grad(self) -> bool:
        """Whether ``param.decoupled_grad`` is read instead of ``param.grad``."""
        return False

    @property
    def control(self) -> StepControl:
        """The device tensors that steer steps: skipped steps, the gradient norm."""
        return self._control

    def main_weight_dtype(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the weight that is updated for ``param``."""
        return param.dtype

    def hyper_table(self, device: torch.device) -> Tensor:
        """Return the [groups, 5] float64 table that steps on a device read."""
        self._hyper.refresh(self.param_groups)
        return self._hyper.on(device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a captured step must be captured again afterwards.

        Raises:
            ConfigError: as for the constructor.
        """
        # torch keeps its compiler from tracing this, and imports it for that: 145 MiB, a second.
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        row = len(self.param_groups) - 1
        try:
            self._rule.check(self.param_groups[row], row)
            self._check_params(row)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._hyper = HyperTable(self._rule)

    def upload_hyperparameters(self) -> None:
        """Copy the numbers in ``param_groups`` to the device where they changed.

        Raises:
            ConfigError: a changed value is out of its range.

        Capture: not a part of the iteration: nothing is recorded. Call it before each replay.
        """
        self._hyper.refresh(self.param_groups)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,  # [] float, multiplies every gradient
        found_inf: Tensor | None = None,  # [] float, nothing is changed unless it is zero
    ) -> float | None:
        """Take one step with the gradients that are bound now; they are only read.

        Parameters without a gradient are skipped: their step count stays.

        Args:
            closure: Computes the loss anew and returns it.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigError: a gradient or a changed hyper-parameter cannot be used; it is named.
            CaptureError: a CUDA graph is being captured and the step needs new state or new
                tables, which only a step before the capture can make.

        Capture: no host sync. The first step, and one after a change of addresses, must be taken
            outside a CUDA capture.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_capturing():
            self.upload_hyperparameters()
        self._take_step(grad_scale, found_inf)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with ``control`` beside it: the number of skipped steps."""
        return {**super().state_dict(), "control": self._control.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's for the same rule, into the tensors that exist.

        Addresses and dtypes stay, so a captured step goes on with the loaded values. State that
        does not exist yet is made.

        Raises:
            ConfigError: the groups, a shape or a setting does not fit; it is named. Nothing has
                been changed then.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        state_dict = recut_states(state_dict, self)
        loaded = self.match(state_dict)
        self.create_missing([param for param, source in loaded.items() if source])
        with torch.no_grad(), without_modes():
            copy_states(loaded, self.state)
            if "control" in state_dict:
                self._control.load_state_dict(state_dict["control"])
        load_groups(state_dict, self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def match(self, state_dict: Mapping[str, Any]) -> Loaded:
        """Find the saved state of each parameter, or None; ConfigError: something does not fit."""
        groups, saved_groups = self.param_groups, state_dict["param_groups"]
        here, there = ([len(group["params"]) for group in g] for g in (groups, saved_groups))
        if here != there:
            raise ConfigError(
                f"the saved state has groups of {there} parameters, this optimizer of {here}"
            )
        name_of = parameter_name(groups)
        loaded: Loaded = {}
        for row, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
            self._check_saved(saved, row)
            for index, (param, key) in enumerate(
                zip(group["params"], saved["params"], strict=True)
            ):
                entries = state_dict["state"].get(key)
                found = Saved(param, row, name_of(row, index), entries, saved)
                loaded[param] = self._match_entries(found) if entries else None
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled or copied: parameters and state may be slices of flat buffers."""
        name = type(self).__name__
        raise NotCopyableError(
            f"{name} cannot be pickled or copied. Remedy: {name}(...) of the copied model's "
            "parameters, and load_state_dict(optimizer.state_dict()); of a sharded model "
            "graphfsdp.save and graphfsdp.load"
        )
