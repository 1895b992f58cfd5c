"""Several optimizers that step in one captured iteration, as one."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.changes import Change
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError


class JointOptimizer:
    """Members that the user's own iteration steps when it likes."""

    def __init__(self, members: Sequence[CapturableOptimizer]) -> None:
        """Join them.

        Raises:
            ConfigError: some of them read decoupled gradients and others do not.
        """
        self._members = list(members)
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
        """Return the dtype that the persistent gradient of ``param`` has under ``policy``."""
        owner = self._owners.get(id(param), self._members[0])
        return owner.main_grad_dtype(param, policy)

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        """Refuse what a member cannot step on.

        Raises:
            PrecisionError: a gradient would reach it as a casted copy.
            ConfigError: it cannot be captured.
        """
        for member in self._members:
            own = {name: p for name, p in named_params.items() if self._owner(p) is member}
            member.check(own, policy, scope)

    def prepare_skipping(self, scope: Scope) -> None:
        """Get ready for steps that a tensor may skip.

        Raises:
            ConfigError: a member cannot skip a step inside a graph.
        """
        for member in self._members:
            member.prepare_skipping(scope)

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that members have skipped; None if none counts them."""
        counts = [
            count for member in self._members if (count := member.skipped_steps()) is not None
        ]
        return torch.stack(counts).sum() if counts else None

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Step all members, one after the other.

        Capture: as of the members.
        """
        for member in self._members:
            member.step(grad_scale, found_inf)

    def bake(self) -> None:
        """Remember the Python values that the recording is about to bake in."""
        for member in self._members:
            member.bake()

    def changes(self) -> list[Change]:
        """Return what the recording has baked in and is not so any more."""
        return [change for member in self._members for change in member.changes()]

    def before_replay(self) -> None:
        """Upload hyper-parameters that changed; refuse a change of a baked one.

        Raises:
            GuardError: a value that the recording has baked in was changed; it is named.
        """
        for member in self._members:
            member.before_replay()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor with a name for messages."""
        for index, member in enumerate(self._members):
            for name, tensor in member.state_tensors():
                yield f"{name} of optimizer {index}", tensor

    def _owner(self, param: nn.Parameter) -> CapturableOptimizer | None:
        return self._owners.get(id(param))
