"""The parts that an offloaded step is taken in: on the device, or in the CPU's memory.

Shapes: [...] this rank's rows of a parameter; [] is a 0-D tensor.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part
from graphfsdp.base.host_memory import zeros_flat
from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.flat_runs import BORDER_NUMEL, continues, slices_like
from graphfsdp.optim.fused.settings import StepSettings
from graphfsdp.optim.fused.state import Loaded, State, wrap_state

_HOST = torch.device("cpu")
_NOT_NUMBERS = frozenset({"params", "param_names"})


class Owned(NamedTuple):
    """A parameter, maybe a DTensor, its group, and its name for messages."""

    param: Tensor
    row: int
    name: str


def buckets(owned: Sequence[Owned], bucket_bytes: int) -> Iterator[list[Owned]]:
    """Yield neighbours of one dtype, together at least so many bytes but for the last.

    A flat run is cut only where vectorised kernels round alike on both sides.
    """
    bucket: list[Owned] = []
    nbytes = run_numel = 0
    previous: Tensor | None = None
    for item in owned:
        local = local_part(item.param.detach())
        if previous is None or not continues(previous, local):
            run_numel = 0
        full = nbytes >= bucket_bytes and run_numel % BORDER_NUMEL == 0
        if previous is not None and (full or local.dtype != previous.dtype):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(item)
        nbytes += local.nbytes
        run_numel += local.numel()
        previous = local
    if bucket:
        yield bucket


class Part:
    """Some parameters of an optimizer, and one of their own that steps them where they are."""

    def __init__(
        self,
        owned: Sequence[Owned],
        outer: DeviceOptimizer,
        tensors: Sequence[Tensor] | None = None,  # stepped in the place of the parameters
        settings: StepSettings | None = None,
    ) -> None:
        self.owned = list(owned)
        self._tensors = [item.param for item in owned] if tensors is None else list(tensors)
        self._rows = sorted({item.row for item in owned})
        made = [
            {
                **self._numbers(outer.param_groups[row]),
                "lr": 0.0,
                "params": [
                    (item.name, tensor) for item, tensor in self._pairs() if item.row == row
                ],
            }
            for row in self._rows
        ]
        settings = settings or outer.settings
        # What decides about a whole step is left to the optimizer outside.
        inner = dataclasses.replace(settings, skip_nonfinite=False, max_grad_norm=None)
        self.inner = DeviceOptimizer(made, dict(outer.defaults), inner, None)

    def refresh(self) -> None:
        """Bring up to date what is stepped in the place of the parameters."""
        return

    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        grad_scale: Tensor | None,  # [] float, where the part is stepped
        found_inf: Tensor | None,  # [] float, likewise
    ) -> None:
        """Take a step with the numbers that the groups outside have."""
        self.refresh()
        for group, row in zip(self.inner.param_groups, self._rows, strict=True):
            group.update(self._numbers(groups[row]))
        self.inner.step(grad_scale=grad_scale, found_inf=found_inf)

    def create(self, params: set[Tensor]) -> None:
        self.refresh()
        self.inner.create_missing([t for item, t in self._pairs() if item.param in params])

    def load(self, loaded: Loaded) -> None:
        self.inner.load_states({tensor: loaded.get(item.param) for item, tensor in self._pairs()})

    def restart(self, params: set[Tensor]) -> None:
        self.refresh()
        self.inner.restart_states(
            {
                tensor: self.inner.state[tensor]
                for item, tensor in self._pairs()
                if item.param in params and self.inner.state.get(tensor)
            }
        )

    def states(self) -> dict[Tensor, State]:
        found = {item.param: self.inner.state.get(tensor) for item, tensor in self._pairs()}
        return {param: state for param, state in found.items() if state}

    def _pairs(self) -> Iterator[tuple[Owned, Tensor]]:
        return zip(self.owned, self._tensors, strict=True)

    def _numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in _NOT_NUMBERS}


class HostPart(Part):
    """A part of parameters of one dtype whose weights and gradients are copied to the CPU."""

    def __init__(
        self, owned: Sequence[Owned], outer: DeviceOptimizer, *, pin_params: bool, pin_grads: bool
    ) -> None:
        on_device = not all(item.param.is_cpu for item in owned)
        self._pins_params = pin_params and on_device
        self._pins_grads = pin_grads and on_device
        locals_ = [local_part(item.param.detach()) for item in owned]
        allocate = partial(_allocate, dtype=locals_[0].dtype, pinned=self._pins_params)
        self.weights = [nn.Parameter(view) for view in slices_like(locals_, allocate)]
        self._grads: list[Tensor | None] = []
        self._versions: list[tuple[int, int]] = []
        # Whatever attribute the gradient is read from, its dtype need not be the weight's.
        settings = dataclasses.replace(outer.settings, use_decoupled_grad=True)
        super().__init__(owned, outer, self.weights, settings)
        self.refresh()

    def refresh(self) -> None:
        """Copy the weights that somebody else has written since the last step."""
        before = self._versions
        self.settle()
        for index, (item, weight) in enumerate(self._pairs()):
            if not before or before[index] != self._versions[index]:
                weight.detach().copy_(local_part(item.param.detach()))

    def fetch(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the gradients of the parameters to the CPU, on the current stream."""
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        if dtypes != [None if copy is None else copy.dtype for copy in self._grads]:
            self._bind(dtypes)
        for copy, grad in zip(self._grads, grads, strict=True):
            if copy is not None and grad is not None:
                copy.copy_(grad, non_blocking=self._pins_grads)

    def _bind(self, dtypes: Sequence[torch.dtype | None]) -> None:
        """Make the copies of the gradients anew, neighbours as the weights are, and bind them."""
        self._grads = [None] * len(dtypes)
        for dtype in dict.fromkeys(dtypes):
            if dtype is not None:
                members = [index for index, own in enumerate(dtypes) if own == dtype]
                allocate = partial(_allocate, dtype=dtype, pinned=self._pins_grads)
                found = slices_like([self.weights[index] for index in members], allocate)
                for index, copy in zip(members, found, strict=True):
                    self._grads[index] = copy
        for weight, bound in zip(self.weights, self._grads, strict=True):
            weight.decoupled_grad = bound  # type: ignore[attr-defined]

    def _numbers(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**super()._numbers(group), "lr": float(group["lr"])}

    def send(self) -> None:
        """Copy the weights back, on the current stream."""
        for item, weight in self._pairs():
            local_part(item.param.detach()).copy_(weight.detach(), non_blocking=self._pins_params)

    def settle(self) -> None:
        """Note that the parameters hold now what their copies do."""
        self._versions = [_version(local_part(item.param.detach())) for item in self.owned]

    def load(self, loaded: Loaded) -> None:
        """ConfigError: a saved tensor is whole where this rank has only rows of it."""
        self.refresh()
        found: Loaded = {}
        for item, weight in self._pairs():
            source = loaded.get(item.param)
            found[item.param] = source and _local_entries(source, weight, item.name)
        super().load(found)
        if self.inner.settings.store_param_remainders:  # main weights were split into the weights
            self.send()
            self.settle()

    def states(self) -> dict[Tensor, State]:
        """Return the state by parameter; of DTensors as DTensors whose parts are on the CPU."""
        return {param: wrap_state(state, param) for param, state in super().states().items()}


class SideCopies:
    """The side streams of the copies; on a CPU, and without overlap, all is done in order."""

    def __init__(self, device: torch.device | None, *, overlap: bool) -> None:
        on_gpu = device is not None and device.type == "cuda" and torch.cuda.is_available()
        self._device = device if on_gpu else None
        streams = self._device is not None and overlap
        self._down = torch.cuda.Stream(self._device) if streams else None
        self._up = torch.cuda.Stream(self._device) if streams else None

    def fork(self) -> None:
        """Let copies begin after what has been enqueued so far."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def downwards(self) -> Any:
        return nullcontext() if self._down is None else torch.cuda.stream(self._down)

    def upwards(self) -> Any:
        return nullcontext() if self._up is None else torch.cuda.stream(self._up)

    def arrival(self) -> Callable[[], None]:
        """Return what waits, on the host, for the copies that have been enqueued so far."""
        if self._device is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def join(self) -> None:
        """Let what follows wait for the copies."""
        for stream in (self._down, self._up):
            if stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(stream)


def _allocate(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    if not pinned:
        return zeros_flat(numel, dtype, _HOST)
    try:
        return torch.empty(numel, dtype=dtype, device=_HOST, pin_memory=True)
    except RuntimeError as error:
        raise ConfigError(
            f"{numel * dtype.itemsize} bytes of page-locked memory cannot be had ({error}). "
            "Remedy: pin_cpu_params=False and pin_cpu_grads=False, or a higher limit (ulimit -l)"
        ) from error


def _version(local: Tensor) -> tuple[int, int]:
    """Return what changes when a tensor is written, or gets other memory."""
    return local._version, local.data_ptr()


def _local_entries(source: Mapping[str, Tensor], weight: Tensor, name: str) -> State:
    found = {key: local_part(value) for key, value in source.items()}
    for key, value in found.items():
        if key != "step" and not key.endswith("_scale") and value.shape != weight.shape:
            raise ConfigError(
                f"the saved {key!r} of {name} has {tuple(value.shape)} elements on this rank, "
                f"expected {tuple(weight.shape)}. Remedy: a state whose tensors are DTensors as "
                "the parameters are, or graphfsdp.load, which reads any"
            )
    return found
