"""Parameters whose optimizer state is in the CPU's memory: copies of weights and gradients there.

Shapes: [...] this rank's rows of a parameter; [] is a 0-D tensor.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part, wrap_like, wrap_rows_like
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.state_loading import Loaded
from graphfsdp.optim.fused.step_settings import StepSettings
from graphfsdp.optim.offload.copies import pack
from graphfsdp.optim.offload.plan import OffloadOptions, Owned

_NOT_NUMBERS = frozenset({"params", "param_names"})


def make_inner(
    owned: Sequence[tuple[Owned, Tensor]],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    settings: StepSettings,
) -> tuple[DeviceOptimizer, list[int]]:
    """Return an optimizer for some of the parameters of another one.

    Args:
        owned: Parameters of the other one, and the tensors that are stepped in their place.
        groups: Of the other one.
        defaults: Of the other one.
        settings: Of the other one; what decides about a whole step is left to that.

    Returns:
        The optimizer, and which group of the other one each of its groups follows.
    """
    inner = dataclasses.replace(settings, skip_nonfinite=False, max_grad_norm=None)
    rows = sorted({item.row for item, _ in owned})
    made = [
        {
            **_numbers(groups[row], on_host=False),
            "lr": 0.0,
            "params": [(item.name, tensor) for item, tensor in owned if item.row == row],
        }
        for row in rows
    ]
    return DeviceOptimizer(made, dict(defaults), inner, None), rows


def follow(
    inner: DeviceOptimizer,
    rows: Sequence[int],
    groups: Sequence[Mapping[str, Any]],
    *,
    on_host: bool,
) -> None:
    """Give the groups of an inner optimizer the numbers that they have outside.

    Args:
        inner: From ``make_inner``.
        rows: From ``make_inner``.
        groups: Of the optimizer outside.
        on_host: Its parameters are on the CPU; an lr that is a tensor elsewhere is read.
    """
    for group, row in zip(inner.param_groups, rows, strict=True):
        group.update(_numbers(groups[row], on_host=on_host))


def _numbers(group: Mapping[str, Any], *, on_host: bool) -> dict[str, Any]:
    found = {key: value for key, value in group.items() if key not in _NOT_NUMBERS}
    if on_host and isinstance(found["lr"], Tensor):
        found["lr"] = float(found["lr"])
    return found


class HostPart:
    """Some parameters, their copies in the CPU's memory, and the optimizer that steps those."""

    def __init__(
        self,
        owned: Sequence[Owned],
        groups: Sequence[Mapping[str, Any]],
        defaults: Mapping[str, Any],
        settings: StepSettings,
        options: OffloadOptions,
    ) -> None:
        """Copy the weights.

        Args:
            owned: The parameters, of one dtype.
            groups: Of the optimizer outside.
            defaults: Of the optimizer outside.
            settings: Of the optimizer outside.
            options: How memory is used.
        """
        self.owned = list(owned)
        on_device = not all(item.param.is_cpu for item in owned)
        self._pins_params = options.pin_cpu_params and on_device
        self._pins_grads = options.pin_cpu_grads and on_device
        locals_ = [local_part(item.param.detach()) for item in owned]
        self.weights = [
            nn.Parameter(view) for view in pack(locals_, None, pinned=self._pins_params)
        ]
        self._grads: list[Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self.inner, self._rows = make_inner(
            list(zip(self.owned, self.weights, strict=True)),
            groups,
            defaults,
            # Whatever attribute the gradient is read from, its dtype need not be the weight's.
            dataclasses.replace(settings, use_decoupled_grad=True),
        )
        self.refresh()

    @property
    def nbytes(self) -> int:
        """Bytes of the copies in the CPU's memory, without state."""
        return sum(tensor.nbytes for tensor in (*self.weights, *self._grads))

    def refresh(self) -> None:
        """Copy the weights that somebody else has written since the last step."""
        locals_ = [local_part(item.param.detach()) for item in self.owned]
        versions = [_version(local) for local in locals_]
        for index, (weight, local) in enumerate(zip(self.weights, locals_, strict=True)):
            if not self._versions or versions[index] != self._versions[index]:
                weight.detach().copy_(local)
        self._versions = versions

    def fetch(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the gradients to the CPU, on the current stream.

        Args:
            grads: [...] each, of each parameter; None where it has none.
        """
        signature = [grad.dtype for grad in grads if grad is not None]
        if [copy.dtype for copy in self._grads] != signature or not self._fits(grads):
            self._bind(grads)
        present = [grad for grad in grads if grad is not None]
        for copy, grad in zip(self._grads, present, strict=True):
            copy.copy_(grad, non_blocking=self._pins_grads)

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        grad_scale: Tensor | None,  # [] float, on the CPU
        found_inf: Tensor | None,  # [] float, on the CPU
    ) -> None:
        """Step the copies; the gradients must have arrived."""
        self.refresh()
        follow(self.inner, self._rows, groups, on_host=True)
        self.inner.step(grad_scale=grad_scale, found_inf=found_inf)

    def send(self) -> None:
        """Copy the weights back, on the current stream."""
        for item, weight in zip(self.owned, self.weights, strict=True):
            local_part(item.param.detach()).copy_(weight.detach(), non_blocking=self._pins_params)

    def settle(self) -> None:
        """Note that the parameters hold now what their copies do."""
        self._versions = [_version(local_part(item.param.detach())) for item in self.owned]

    def create(self, params: set[Tensor]) -> None:
        """Make the state of some parameters that have none."""
        self.refresh()
        pairs = zip(self.owned, self.weights, strict=True)
        self.inner.create_missing([weight for item, weight in pairs if item.param in params])

    def load(self, loaded: Loaded) -> None:
        """Copy saved states; see ``DeviceOptimizer.load_state_dict``.

        Raises:
            ConfigError: a saved tensor is whole where this rank has only rows of it.
        """
        self.refresh()
        found: Loaded = {}
        for item, weight in zip(self.owned, self.weights, strict=True):
            source = loaded.get(item.param)
            found[weight] = None if source is None else _local_entries(source, weight, item.name)
        self.inner.load_states(found)
        self.send_remainders()

    def send_remainders(self) -> None:
        """Copy back weights into which loaded main weights were split."""
        if self.inner.settings.store_param_remainders:
            self.send()
            self.settle()

    def restart(self, params: set[Tensor]) -> None:
        """Give the states of some parameters the values of new state."""
        self.refresh()
        states: dict[Tensor, dict[str, Tensor]] = {
            weight: self.inner.state[weight]
            for item, weight in zip(self.owned, self.weights, strict=True)
            if item.param in params and self.inner.state.get(weight)
        }
        self.inner.restart_states(states)

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the state by parameter; of DTensors as DTensors whose parts are on the CPU."""
        found = {}
        for item, weight in zip(self.owned, self.weights, strict=True):
            state = self.inner.state.get(weight)
            if state:
                found[item.param] = {k: _wrap(k, v, item.param) for k, v in state.items()}
        return found

    def _fits(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether the same parameters have gradients as those that the copies are for."""
        return all(
            (getattr(weight, "decoupled_grad", None) is None) == (grad is None)
            for weight, grad in zip(self.weights, grads, strict=True)
        )

    def _bind(self, grads: Sequence[Tensor | None]) -> None:
        """Make the copies of the gradients anew, and bind them."""
        present = [w for w, grad in zip(self.weights, grads, strict=True) if grad is not None]
        dtypes = [grad.dtype for grad in grads if grad is not None]
        self._grads = pack(present, dtypes, pinned=self._pins_grads)
        copies = iter(self._grads)
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.decoupled_grad = None if grad is None else next(copies)  # type: ignore[attr-defined]


def _version(local: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written, or gets other memory."""
    return local._version, local.data_ptr()


def _wrap(key: str, value: Tensor, param: Tensor) -> Tensor:
    if key == "step":
        return value
    return wrap_rows_like(value, param) if key.endswith("_scale") else wrap_like(value, param)


def _local_entries(source: Mapping[str, Tensor], weight: Tensor, name: str) -> dict[str, Tensor]:
    found = {key: local_part(value) for key, value in source.items()}
    for key, value in found.items():
        if key != "step" and not key.endswith("_scale") and value.shape != weight.shape:
            raise ConfigError(
                f"the saved {key!r} of {name} has {tuple(value.shape)} elements on this rank, "
                f"expected {tuple(weight.shape)}. Remedy: a state whose tensors are DTensors as "
                "the parameters are, or graphfsdp.load, which reads any"
            )
    return found
