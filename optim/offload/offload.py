"""Optimizer state in the CPU's memory, all of it or a fraction.

Shapes: [] is a 0-D tensor.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.grad_norm import norm_parts
from graphfsdp.optim.fused.rules import check_buffers
from graphfsdp.optim.fused.scaled_moments import fits_scales
from graphfsdp.optim.fused.state_loading import Loaded
from graphfsdp.optim.fused.step_members import parameter_name
from graphfsdp.optim.fused.step_plan import gradients_of
from graphfsdp.optim.offload.copies import SideCopies
from graphfsdp.optim.offload.host_part import HostPart, follow, make_inner
from graphfsdp.optim.offload.plan import (
    OffloadOptions,
    Owned,
    buckets,
    choose_offloaded,
    state_bytes,
)


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
        self._options = OffloadOptions(
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
        self._kept: tuple[DeviceOptimizer, list[int]] | None = None
        self._kept_params: list[Tensor] = []
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
        return sum(state_bytes(param, self._settings) for param in self.offloaded)

    def state_device(self, param: Tensor) -> torch.device:
        """Return where the state of ``param`` is, or will be."""
        known = self._is_offloaded
        # Somebody who loads asks for each parameter; a group may have joined since.
        if param not in known or len(known) != sum(len(g["params"]) for g in self.param_groups):
            offloaded = set(self.offloaded)
            known = {other: other in offloaded for other in self._parameters()}
            self._is_offloaded = known
        return torch.device("cpu") if known.get(param) else super().state_device(param)

    def upload_hyperparameters(self) -> None:
        """Check the numbers; a step reads them.

        Raises:
            ConfigError: a changed value is out of its range.
        """
        check_buffers(self.param_groups, self._settings.has_moments)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: Tensor | None = None,  # [] float, multiplies every gradient
        found_inf: Tensor | None = None,  # [] float, nothing is changed unless it is zero
    ) -> float | None:
        """Take one step with the gradients that are bound now; they are only read.

        Args:
            closure: Computes the loss anew and returns it.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigError: a gradient or a changed number cannot be used; it is named.
            CaptureError: a CUDA graph is being captured.

        Capture: impossible, since the host waits for the gradients.
        """
        loss: float | None = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "the step of CPUOffload waits for gradients on the host, which no CUDA graph can "
                "hold. Remedy: capture forward and backward alone (scope='forward_backward')"
            )
        self.upload_hyperparameters()
        self._build()
        params = self._parameters()
        grads = gradients_of(params, decoupled=self.use_decoupled_grad)
        if params:
            self._control.place(local_part(params[0]).device)
        parts = norm_parts(params, grads) if self._control.needs_norm(found_inf) else None
        grad_scale, found_inf = self._control.prepare(parts, grad_scale, found_inf)
        by_param = dict(zip(params, grads, strict=True))
        self._run(by_param, grad_scale, found_inf)
        if found_inf is not None:
            skipped = self._control.skipped_steps
            skipped.add_((found_inf != 0).to(skipped.device, skipped.dtype))
        self._control.finish(found_inf)
        self._collect_states()
        return loss

    def _run(
        self,
        grads: Mapping[Tensor, Tensor | None],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Step what the device keeps while gradients are copied; then the rest, part by part."""
        copies = self._copies
        copies.fork()
        if self._kept is not None:
            inner, rows = self._kept
            follow(inner, rows, self.param_groups, on_host=False)
            inner.step(grad_scale=grad_scale, found_inf=found_inf)
        arrivals = []
        with copies.downwards():
            scalars = [_to_host(grad_scale), _to_host(found_inf)]
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

    def _build(self) -> None:
        """Divide the parameters into parts, if they are not what they were."""
        params = self._parameters()
        same = len(params) == len(self._built_for)
        if same and all(p is q for p, q in zip(params, self._built_for, strict=True)):
            return
        old = {param: entries for param, entries in self.state.items() if entries}
        self.state.clear()
        self._reset()
        self._built_for = params
        offloaded = {id(param) for param in self.offloaded}
        name_of = parameter_name(self.param_groups)
        owned = [
            Owned(param, row, name_of(row, index).removeprefix("parameter ").strip("'"))
            for row, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]
        shared = (self.param_groups, self.defaults, self._settings)
        kept = [(item, item.param) for item in owned if id(item.param) not in offloaded]
        if kept:
            self._kept = make_inner(kept, *shared)
            self._kept_params = [param for _, param in kept]
        for bucket in buckets(
            [item for item in owned if id(item.param) in offloaded], self._options.bucket_bytes
        ):
            self.host_parts.append(HostPart(bucket, *shared, self._options))
        device = local_part(params[0]).device if params else None
        self._copies = SideCopies(device, overlap=self._options.overlap)
        if old:  # a group was added
            self.load_states(dict(old))

    def _collect_states(self) -> None:
        if self._kept is not None:
            inner, _ = self._kept
            self.state.update({param: inner.state[param] for param in inner.state})
        for part in self.host_parts:
            if any(not self.state.get(item.param) for item in part.owned):
                self.state.update(part.states())

    def create_missing(self, params: Iterable[Tensor]) -> None:
        """Make the state of parameters that have none."""
        self._build()
        wanted = set(params)
        if self._kept is not None:
            self._kept[0].create_missing([p for p in self._kept_params if p in wanted])
        for part in self.host_parts:
            part.create(wanted)
        self._collect_states()

    def load_states(self, loaded: Loaded) -> None:
        """Copy what ``match_state_dict`` found; state that does not exist yet is made."""
        self._build()
        if self._kept is not None:
            own = set(self._kept_params)
            self._kept[0].load_states({p: s for p, s in loaded.items() if p in own})
        for part in self.host_parts:
            part.load(loaded)
        self._collect_states()

    @torch.no_grad()
    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give state that exists the values of new state, in place.

        Args:
            states: State by parameter, all of it entries of ``state``.
        """
        if self._kept is not None:
            own = set(self._kept_params)
            self._kept[0].restart_states({p: s for p, s in states.items() if p in own})
        for part in self.host_parts:
            part.restart(set(states))
        if len(states) == len(self.state):  # no step was taken before
            self._control.restart()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        return {**super().__getstate__(), "_options": self._options, "_kind": self._kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        self._options, self._kind = state["_options"], state["_kind"]
        super().__setstate__(state)
        inners = [part.inner for part in self.host_parts]
        for inner in [*inners, *([] if self._kept is None else [self._kept[0]])]:
            inner.count_classes()


def _to_host(scalar: Tensor | None) -> Tensor | None:
    return None if scalar is None else scalar.to("cpu", non_blocking=True)
