"""Adapters that make optimizers capturable; ``adapt`` chooses one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import Change, ConfigError
from graphfsdp.optim.adapters.as_made import TorchAdapter, is_as_made
from graphfsdp.optim.adapters.baked import Adapter, BakedAdapter
from graphfsdp.optim.adapters.foreign import TransformerEngineAdapter, is_transformer_engines
from graphfsdp.optim.adapters.precision import OptimizerFacts
from graphfsdp.optim.fused.adam import FusedAdam
from graphfsdp.optim.fused.live_optimizer import LiveOptimizer


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

    def _baked_part(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}  # all that may change is uploaded

    def before_replay(self) -> None:
        super().before_replay()
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
