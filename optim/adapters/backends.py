"""Adapters that make optimizers capturable; ``adapt`` chooses one."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.changes import Change, ChangeKind, refuse
from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError
from graphfsdp.optim.adapters.baked_adapter import Adapter, BakedAdapter
from graphfsdp.optim.adapters.baked_values import changed_groups
from graphfsdp.optim.adapters.foreign_adapters import ForeignAdamAdapter, foreign_name
from graphfsdp.optim.adapters.one_mesh import one_mesh_at_a_time
from graphfsdp.optim.adapters.precision_guard import OptimizerFacts
from graphfsdp.optim.adapters.precision_table import OFFLOAD, TORCH_SGD, Situation, find_row
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.live_optimizer import LiveOptimizer
from graphfsdp.optim.offload.offload import CPUOffload


def adapt(optimizer: torch.optim.Optimizer) -> CapturableOptimizer:
    """Return the adapter that fits an optimizer.

    Args:
        optimizer: one of ours; torch's AdamW, Adam or SGD; the FusedAdam of Transformer Engine or
            apex; or any other, which is accepted with its numbers guarded.

    Raises:
        ConfigError: it is no optimizer, or one that runs the model by itself.
    """
    if isinstance(optimizer, CPUOffload):
        return OffloadAdapter(optimizer)
    if isinstance(optimizer, LiveOptimizer):
        return NativeAdapter(optimizer)
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return TorchAdamAdapter(optimizer)
    if isinstance(optimizer, torch.optim.SGD) and foreign_name(optimizer) is None:
        return TorchSGDAdapter(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "torch LBFGS runs the model as often as it likes within a step (step(closure)), so "
            "its iteration is no fixed one. Remedy: an optimizer that steps without a closure"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        name = foreign_name(optimizer)
        return BakedAdapter(optimizer) if name is None else ForeignAdamAdapter(optimizer, name)
    raise ConfigError(
        f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}; for a custom one, "
        "derive from torch.optim.Optimizer"
    )


class NativeAdapter(Adapter):
    """An optimizer of ours, all of whose numbers are live in a replay."""

    def __init__(self, optimizer: LiveOptimizer) -> None:
        super().__init__(
            optimizer,
            OptimizerFacts(
                name=type(optimizer).__name__,
                use_decoupled_grad=optimizer.use_decoupled_grad,
                main_weight_dtype=optimizer.main_weight_dtype,
                mixed_gradients=True,
                keeps_main_weights=isinstance(optimizer, DeviceOptimizer),
            ),
        )
        self._native = optimizer
        self._baked: list[tuple[int, int | None]] | None = None

    def prepare_skipping(self, scope: Scope) -> None:
        """Do nothing: every step can be skipped on the device."""

    def skipped_steps(self) -> Tensor:
        """Return [] float32, the steps that were skipped so far."""
        return self._native.control.skipped_steps

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Take one step.

        Capture: see ``DeviceOptimizer.step``.
        """
        self._native.step(grad_scale=grad_scale, found_inf=found_inf)

    def bake(self) -> None:
        """Remember the groups' sizes, and which lr is which tensor."""
        self._baked = self._layout()

    def changes(self) -> list[Change]:
        """Return what makes the recording useless: other groups, or another tensor as lr."""
        if self._baked is None or self._layout() == self._baked:
            return []
        now = self._layout()
        changes = [
            _changed_lr(self._name, index, old, new)
            for index, ((_, old), (_, new)) in enumerate(zip(self._baked, now, strict=False))
            if old != new
        ]
        sizes = [[size for size, _ in layout] for layout in (self._baked, now)]
        if sizes[0] != sizes[1]:
            changes.append(changed_groups(self._name, *sizes))
        return changes

    def before_replay(self) -> None:
        """Upload the numbers that changed.

        Raises:
            GuardError: a group was added, or an lr that is a tensor was replaced.
            ConfigError: a changed value is out of its range.
        """
        refuse(self.changes())
        self._native.upload_hyperparameters()
        # Schedulers warn when they have not seen a step, and a replay calls none.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""
        yield from super().state_tensors()
        devices = {param.device for group in self._native.param_groups for param in group["params"]}
        for device in sorted(devices, key=str):
            yield f"hyper-parameter table on {device}", self._native.hyper_table(device)
        yield from self._native.control.tensors()

    def _layout(self) -> list[tuple[int, int | None]]:
        return [
            (len(group["params"]), id(group["lr"]) if isinstance(group["lr"], Tensor) else None)
            for group in self._native.param_groups
        ]


class OffloadAdapter(NativeAdapter):
    """An optimizer with state in the CPU's memory, which no graph can hold."""

    def _check_inside_graph(
        self, named_params: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        """Refuse it.

        Raises:
            ConfigError: always, but for a table that says otherwise.
        """
        row = find_row(Situation(OFFLOAD))
        if not row.captured:
            raise ConfigError(
                f"an optimizer whose state is offloaded to the CPU ({self._name}) cannot be part "
                f"of a graph: {row.why}. Remedy: {row.remedy}"
            )


class _TorchAdapter(BakedAdapter):
    """An optimizer of torch whose step only reads its groups."""

    def _take_step(self) -> None:
        with one_mesh_at_a_time(self.optimizer):
            self.optimizer.step()

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Pass: parameters may lie on several meshes."""


class TorchAdamAdapter(_TorchAdapter):
    """torch's Adam and AdamW, which are capturable with ``fused=True``."""

    def __init__(self, optimizer: torch.optim.Adam | torch.optim.AdamW) -> None:
        super().__init__(optimizer)
        # Eager steps of a capturable optimizer are on purpose here; torch would warn about them.
        optimizer._warned_capturable_if_run_uncaptured = True

    def _check_inside_graph(
        self, named_params: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        """Refuse a step that counts on the host.

        Raises:
            ConfigError: ``fused`` or, on CUDA, ``capturable`` is not set, or lr is on another
                device.
        """
        super()._check_inside_graph(named_params, policy)
        for index, group in enumerate(self.optimizer.param_groups):
            on_cuda = any(param.is_cuda for param in group["params"])
            missing = [
                f"{key}=True"
                for key, needed in (("fused", True), ("capturable", on_cuda))
                if needed and not group.get(key)
            ]
            if missing:
                self._refuse(index, " and ".join(missing))

    def _refuse(self, index: int, missing: str) -> None:
        made = f"{type(self.optimizer).__name__}(..., {missing.replace(' and ', ', ')})"
        raise ConfigError(
            f"{self._name} counts its steps on the host, which a captured step would freeze: "
            f"group {index} was made without {missing}. Ways out: (1) {made}; "
            f"(2) graphfsdp.optim.FusedAdam, all of whose "
            "numbers stay live; (3) scope='forward_backward', which leaves the optimizer outside "
            "the graph"
        )


class TorchSGDAdapter(_TorchAdapter):
    """torch's SGD, which is capturable as it is."""

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse what torch's SGD cannot step on.

        Raises:
            ConfigError: it is fused and parameters are DTensors.
        """
        row = find_row(Situation(TORCH_SGD, dtensor=True))
        for name, param in named_params.items():
            if is_dtensor(param) and any(g.get("fused") for g in self.optimizer.param_groups):
                raise ConfigError(
                    f"{self._name}(fused=True) cannot step on {name!r}, which is a DTensor: "
                    f"{row.why}. Remedy: {row.remedy}"
                )


def _changed_lr(owner: str, index: int, old: int | None, new: int | None) -> Change:
    """Return the change of an lr that became, ceased to be, or is another tensor (by id)."""
    was, now = ("a number" if lr is None else "a tensor" for lr in (old, new))
    if was == now:
        now = "another tensor"
    remedy = "write into the tensor (fill_), or keep to numbers"
    return Change(ChangeKind.BAKED_VALUE, f"lr of group {index} of {owner}", was, now, remedy)


__all__ = [
    "BakedAdapter",
    "NativeAdapter",
    "OffloadAdapter",
    "TorchAdamAdapter",
    "TorchSGDAdapter",
    "adapt",
]
