"""Adapters that make optimizers capturable; ``adapt`` chooses one."""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.protocols import CapturableOptimizer
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import Change, ConfigError, PrecisionError
from graphfsdp.optim.adapters.as_made import TorchAdapter, is_as_made
from graphfsdp.optim.adapters.baked import Adapter, BakedAdapter
from graphfsdp.optim.adapters.precision import OptimizerFacts
from graphfsdp.optim.fused.adam import FusedAdam
from graphfsdp.optim.fused.live_optimizer import LiveOptimizer

# Before it parameters without elements, DTensors, gradients of another dtype and bfloat16 moments
# go wrong inside a graph of Transformer Engine's, each until another version.
_OLDEST = (2, 20)
_FP32, _BF16 = torch.float32, torch.bfloat16
_OURS = "graphfsdp.optim.FusedAdam"


def adapt(optimizer: torch.optim.Optimizer) -> CapturableOptimizer:
    if isinstance(optimizer, LiveOptimizer):
        return NativeAdapter(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "torch LBFGS runs the model as often as it likes within a step (step(closure)), so "
            "its iteration is no fixed one. Remedy: an optimizer that steps without a closure"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        if is_transformer_engines(optimizer):
            return TransformerEngineAdapter(optimizer)
        return TorchAdapter(optimizer) if is_as_made(optimizer) else BakedAdapter(optimizer)
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
                keeps_main_weights=isinstance(optimizer, FusedAdam),
            ),
        )
        self._native = optimizer

    def prepare_skipping(self, scope: Scope) -> None:
        """Do nothing: every step can be skipped on the device."""

    def skipped_steps(self) -> Tensor:
        return self._native.control.skipped_steps

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        self._native.step(grad_scale=grad_scale, found_inf=found_inf)

    def bake(self) -> None:
        """Do nothing: all that may change is uploaded."""

    def changes(self) -> list[Change]:
        return []

    def before_replay(self) -> None:
        # Schedulers warn when they have not seen a step, and a replay calls none.
        self._native._opt_called = True  # type: ignore[attr-defined]
        self._native.upload_hyperparameters()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().state_tensors()
        devices = {param.device for group in self._native.param_groups for param in group["params"]}
        for device in sorted(devices, key=str):
            yield f"hyper-parameter table on {device}", self._native.hyper_table(device)
        yield from self._native.control.tensors()


class JointOptimizer:
    """Members that the user's own iteration steps when it likes."""

    def __init__(self, members: Sequence[CapturableOptimizer]) -> None:
        self.members = list(members)
        self.optimizers = tuple(o for member in members for o in member.optimizers)
        kinds = {member.use_decoupled_grad for member in members}
        if len(kinds) > 1:
            raise ConfigError(
                "some optimizers have use_decoupled_grad=True and others have not; gradients lie "
                "in one place. Remedy: give all of them the same"
            )
        self.use_decoupled_grad = kinds.pop()
        self._owners = {
            id(param): member
            for member in members
            for optimizer in member.optimizers
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
        owner = self._owners.get(id(param), self.members[0])
        return owner.main_grad_dtype(param, policy)

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        for member in self.members:
            own = {name: p for name, p in named_params.items() if self._owners.get(id(p)) is member}
            member.check(own, policy, scope)

    def prepare_skipping(self, scope: Scope) -> None:
        for member in self.members:
            member.prepare_skipping(scope)

    def step_by_groups(self) -> None:
        for member in self.members:
            member.step_by_groups()

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that members have skipped; None if none counts them."""
        counts = [count for member in self.members if (count := member.skipped_steps()) is not None]
        return torch.stack(counts).sum() if counts else None

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        for member in self.members:
            member.step(grad_scale, found_inf)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with ExitStack() as stack:
            for member in self.members:
                stack.enter_context(member.stepping())
            yield

    def bake(self) -> None:
        for member in self.members:
            member.bake()

    def changes(self) -> list[Change]:
        return [change for member in self.members for change in member.changes()]

    def before_replay(self) -> None:
        for member in self.members:
            member.before_replay()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for index, member in enumerate(self.members):
            for name, tensor in member.state_tensors():
                yield f"{name} of optimizer {index}", tensor


class UnsteppedOptimizer(JointOptimizer):
    """Members of which no graph can hold a step: a check has told so, and leaves them alone."""

    def check(self, *_: object) -> None:
        """Do nothing: what is wrong was told."""

    def step(self, *_: object) -> None:
        """Do nothing: it may want what no step in a graph has."""


def is_transformer_engines(optimizer: torch.optim.Optimizer) -> bool:
    cls = type(optimizer)
    return cls.__name__ == "FusedAdam" and cls.__module__.startswith("transformer_engine.")


def installed_version(package: str) -> tuple[int, ...]:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


class TransformerEngineAdapter(BakedAdapter):
    """The FusedAdam of Transformer Engine, captured as its newest versions allow.

    Its lr is a tensor that stays live; other numbers are baked.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(
            optimizer,
            OptimizerFacts(
                name="Transformer Engine FusedAdam",
                use_decoupled_grad=bool(getattr(optimizer, "use_decoupled_grad", False)),
                main_weight_dtype=lambda param: self._main_dtype(param) or param.dtype,
                keeps_main_weights=True,
            ),
        )

    def _check_inside_graph(self, named_params: Mapping[str, nn.Parameter]) -> None:
        super()._check_inside_graph(named_params)
        version = installed_version("transformer_engine")
        for name, param in named_params.items():
            for what, why, remedy in self._refusals(param, version):
                shown = ".".join(map(str, version)) or "of unknown version"
                raise PrecisionError(
                    f"{self._name} {shown} cannot be captured with {what}, as for {name!r}: {why}. "
                    f"Remedy: {remedy}"
                )

    def _refusals(self, param: Tensor, version: tuple[int, ...]) -> Iterator[tuple[str, str, str]]:
        """Yield what it cannot do inside a graph, why, and the remedy."""
        made: Any = self.optimizer
        if not getattr(made, "capturable", False):
            why = "it keeps lr and the step count on the host, which a replay would freeze"
            yield "what was made without capturable=True", why, "capturable=True"
        if version < _OLDEST:
            why = "its capturable kernels before 2.20 cannot do all that is asked of them here"
            yield "any setting", why, f"Transformer Engine 2.20, or {_OURS}"
        if getattr(made, "store_param_remainders", False):
            why = "its capturable kernels know no remainders"
            yield "store_param_remainders=True", why, "store_param_remainders=False"
        if self._main_dtype(param) not in (None, _FP32):
            why = "other main weights go through temporary copies, whose addresses change"
            yield "main weights that are not float32", why, "master_weight_dtype=torch.float32"
        moments = {getattr(made, f"{key}_dtype", _FP32) for key in ("exp_avg", "exp_avg_sq")}
        if moments not in ({_FP32}, {_BF16}):
            why = "other moments go through temporary copies, whose addresses change"
            remedy = f"both float32 or both bfloat16, or {_OURS}"
            yield "moments that are not both float32 or both bfloat16", why, remedy

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Scale and skip in the optimizer's own kernels. Capture: as capturable as these are."""
        made: Any = self.optimizer
        if not getattr(made, "capturable", False):
            super().step(grad_scale, found_inf)
            return
        if found_inf is not None and self._skipped is not None:
            self._skipped.add_(found_inf)
        if grad_scale is None and found_inf is None:
            made.step()
        else:
            made.step(grad_scaler=_Steering(self.optimizer, grad_scale, found_inf))

    def _main_dtype(self, param: Tensor) -> torch.dtype | None:
        made: Any = self.optimizer
        if not getattr(made, "master_weights", False) or param.dtype == torch.float32:
            return None
        dtype: torch.dtype = getattr(made, "master_weight_dtype", torch.float32)
        return dtype


class _Steering:
    """What it asks a torch GradScaler for: whether to skip, and what to divide by."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grad_scale: Tensor | None,  # [] float32, multiplies every gradient
        found_inf: Tensor | None,  # [] float32
    ) -> None:
        self._devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        self._grad_scale = grad_scale
        self._found_inf = found_inf

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Return [] float32 for each device, 1 where the step is to be skipped."""
        if self._found_inf is None:
            return {device: torch.zeros((), device=device) for device in self._devices}
        flag = (self._found_inf != 0).float()
        return {device: flag.to(device) for device in self._devices}

    def _get_scale_async(self) -> Tensor:
        """Return [] float64, the reciprocal of what gradients are to be multiplied by."""
        if self._grad_scale is None:
            device = next(iter(self._devices))
            return torch.ones((), dtype=torch.float64, device=device)
        return self._grad_scale.double().reciprocal()
