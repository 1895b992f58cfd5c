"""Optimizer state in the CPU's memory, all of it or a fraction.

Shapes: [] is a 0-D tensor.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.streams import is_capturing
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.optim.fused.checks import parameter_name
from graphfsdp.optim.fused.control import norm_parts
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.plan import gradients_of
from graphfsdp.optim.fused.settings import StepSettings
from graphfsdp.optim.fused.state import Loaded
from graphfsdp.optim.fused.storage import fits_scales, has_scales, scale_shape
from graphfsdp.optim.offload.parts import HostPart, Owned, Part, SideCopies, buckets


@dataclass(frozen=True)
class _Options:
    """How state is kept in the CPU's memory; see ``CPUOffload``."""

    offload_fraction: float
    pin_cpu_params: bool
    pin_cpu_grads: bool
    overlap: bool
    bucket_bytes: int


class CPUOffload(DeviceOptimizer):
    """FusedAdam, FusedSGD or FusedLion with state in the CPU's memory.

    Gradients are copied to the CPU, weights stepped there, and copied back; a fraction of the
    parameters may be left to the device. With bfloat16 parameters and main weights, the device
    keeps nothing but parameters and gradients. Parameters that are DTensors are stepped by this
    rank's rows; their states are DTensors too, whose parts are on the CPU, so that checkpoints
    are those of the optimizer that was given.

    A step waits for gradients on the host, so that no graph can hold it: capture with
    ``scope="forward_backward"``.
    """

    def __init__(
        self,
        optimizer: DeviceOptimizer,
        *,
        offload_fraction: float = 1.0,
        pin_cpu_params: bool = False,
        pin_cpu_grads: bool = False,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        bucket_bytes: int = 64 * 2**20,
    ) -> None:
        """Take over an optimizer that has not stepped yet; do not step it any more.

        Args:
            optimizer: Gives parameters, groups (they are shared) and settings.
            offload_fraction: Share of this rank's elements that is offloaded, in the order of the
                parameters until it is reached, each as a whole.
            pin_cpu_params: Keep the copies of the weights in page-locked memory, which makes
                copies to a GPU fast and asynchronous.
            pin_cpu_grads: The same for gradients.
            overlap_cpu_optimizer_d2h_h2d: Copy, on streams of their own, while others are stepped.
            bucket_bytes: Weights that are copied and stepped together.

        Raises:
            ConfigError: another optimizer, one with state, or a number out of its range.
        """
        if not isinstance(optimizer, DeviceOptimizer) or isinstance(optimizer, CPUOffload):
            raise ConfigError(
                "CPUOffload takes a FusedAdam, FusedSGD or FusedLion, which step elementwise; got "
                f"{type(optimizer).__name__}"
            )
        if optimizer.state:
            raise ConfigError(
                f"this {type(optimizer).__name__} has state already. Remedy: CPUOffload around a "
                "new one, then load_state_dict"
            )
        if not 0 <= offload_fraction <= 1:
            raise ConfigError(f"offload_fraction must be in [0, 1], got {offload_fraction!r}")
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be at least 1, got {bucket_bytes!r}")
        self._options = _Options(
            offload_fraction,
            pin_cpu_params,
            pin_cpu_grads,
            overlap_cpu_optimizer_d2h_h2d,
            bucket_bytes,
        )
        self._kind = optimizer.state_kind
        groups = optimizer.param_groups
        super().__init__(
            [dict(group) for group in groups],
            optimizer.defaults,
            optimizer.settings,
            optimizer.control.grad_scaler,
        )
        # A scheduler of the given optimizer goes on steering this one.
        self.param_groups = groups

    def _reset(self) -> None:
        super()._reset()
        self.host_parts: list[HostPart] = []
        self._kept: list[Part] = []  # one, of what the device keeps, or none
        self._built_for: list[Tensor] = []
        self._is_offloaded: dict[Tensor, bool] = {}
        self._copies = SideCopies(None, overlap=False)

    @property
    def state_kind(self) -> str:
        """The class of the optimizer that was given."""
        return self._kind

    @property
    def offloaded(self) -> list[Tensor]:
        """The parameters whose state is in the CPU's memory."""
        params = self._parameters()
        numels = [local_part(param).numel() for param in params]
        chosen = choose_offloaded(numels, self._options.offload_fraction)
        return [
            param
            for param, is_chosen in zip(params, chosen, strict=True)
            # Moments with scales: the rows alone must be stored as in the whole parameter.
            if is_chosen
            and not (
                self._settings.uses_scales and fits_scales(param) != fits_scales(local_part(param))
            )
        ]

    @property
    def saved_bytes(self) -> int:
        """Bytes of state that this rank's device need not keep, from the dtypes."""
        return sum(_state_bytes(param, self._settings) for param in self.offloaded)

    def state_device(self, param: Tensor) -> torch.device:
        """Return where the state of ``param`` is, or will be."""
        places = self._is_offloaded
        # Somebody who loads asks for each parameter; a group may have joined since.
        if param not in places or len(places) != sum(len(g["params"]) for g in self.param_groups):
            offloaded = set(self.offloaded)
            places = {other: other in offloaded for other in self._parameters()}
            self._is_offloaded = places
        return torch.device("cpu") if places.get(param) else super().state_device(param)

    def _take_step(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Capture: impossible, since the host waits for the gradients."""
        if is_capturing():
            raise CaptureError(
                "the step of CPUOffload waits for gradients on the host, which no CUDA graph can "
                "hold. Remedy: capture forward and backward alone (scope='forward_backward')"
            )
        self._build()
        params = self._parameters()
        grads = gradients_of(params, decoupled=self.use_decoupled_grad)
        if params:
            self._control.place(local_part(params[0]).device)
        parts = norm_parts(params, grads) if self._control.needs_norm(found_inf) else None
        grad_scale, found_inf = self._control.prepare(parts, grad_scale, found_inf)
        self._run(dict(zip(params, grads, strict=True)), grad_scale, found_inf)
        if found_inf is not None:
            skipped = self._control.skipped_steps
            skipped.add_((found_inf != 0).to(skipped.device, skipped.dtype))
        self._control.finish(found_inf)
        self._collect_states()

    def _run(
        self,
        grads: Mapping[Tensor, Tensor | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step what the device keeps while gradients are copied; then the rest, part by part."""
        copies = self._copies
        copies.fork()
        for kept in self._kept:
            kept.step(self.param_groups, grad_scale, found_inf)
        arrivals = []
        with copies.downwards():
            scalars = [
                None if scalar is None else scalar.to("cpu", non_blocking=True)
                for scalar in (grad_scale, found_inf)
            ]
            for part in self.host_parts:
                part.fetch([grads[item.param] for item in part.owned])
                arrivals.append(copies.arrival())
        for part, wait in zip(self.host_parts, arrivals, strict=True):
            wait()
            part.step(self.param_groups, *scalars)
            with copies.upwards():
                part.send()
        copies.join()
        for part in self.host_parts:
            part.settle()

    @property
    def _parts(self) -> list[Part]:
        return [*self._kept, *self.host_parts]

    def _build(self) -> None:
        """Divide the parameters into parts, if they are not what they were."""
        params = self._parameters()
        if len(params) == len(self._built_for) and all(map(operator.is_, params, self._built_for)):
            return
        old = {param: entries for param, entries in self.state.items() if entries}
        self.state.clear()
        self._reset()
        self._built_for = params
        offloaded = set(self.offloaded)
        name_of = parameter_name(self.param_groups)
        owned = [
            Owned(param, row, name_of(row, index).removeprefix("parameter ").strip("'"))
            for row, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]
        kept = [item for item in owned if item.param not in offloaded]
        self._kept = [Part(kept, self)] if kept else []
        self.host_parts = [
            HostPart(
                bucket,
                self,
                pin_params=self._options.pin_cpu_params,
                pin_grads=self._options.pin_cpu_grads,
            )
            for bucket in buckets(
                [item for item in owned if item.param in offloaded], self._options.bucket_bytes
            )
        ]
        device = local_part(params[0]).device if params else None
        self._copies = SideCopies(device, overlap=self._options.overlap)
        if old:  # a group was added
            self.load_states(dict(old))

    def _collect_states(self) -> None:
        for part in self._parts:
            if any(not self.state.get(item.param) for item in part.owned):
                self.state.update(part.states())

    def create_missing(self, params: Iterable[Tensor]) -> None:
        """Make the state of parameters that have none."""
        self._build()
        wanted = set(params)
        for part in self._parts:
            part.create(wanted)
        self._collect_states()

    def load_states(self, loaded: Loaded) -> None:
        """Copy what ``match`` found; state that does not exist yet is made."""
        self._build()
        for part in self._parts:
            part.load(loaded)
        self._collect_states()

    @torch.no_grad()
    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give state that exists the values of new state, in place; see ``Restartable``."""
        for part in self._parts:
            part.restart(set(states))
        if len(states) == len(self.state):  # no step was taken before
            self._control.restart()

    def count_classes(self) -> None:
        """Find out which parameters have equal step counts, after these were written."""
        super().count_classes()
        for part in self._parts:
            part.inner.count_classes()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options, "_kind": self._kind}


def choose_offloaded(numels: Sequence[int], fraction: float) -> list[bool]:
    """Return which parameters are offloaded: from the first on, until the fraction is reached.

    Source: Megatron-LM, ``HybridDeviceOptimizer``.
    """
    wanted, so_far = fraction * sum(numels), 0
    chosen = []
    for numel in numels:
        chosen.append(so_far < wanted)
        so_far += numel if chosen[-1] else 0
    return chosen


def _state_bytes(param: Tensor, settings: StepSettings) -> int:
    """Return the bytes of state of this rank's rows of a parameter, without the step count."""
    local = local_part(param)
    num_bytes = 0
    for dtype in settings.state_dtypes(param).values():
        num_bytes += local.numel() * dtype.itemsize
        if has_scales(dtype):
            rows, blocks = scale_shape(local.shape)
            num_bytes += rows * blocks * torch.float32.itemsize
    return num_bytes
