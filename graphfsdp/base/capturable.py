"""What a capture asks of an optimizer, and of modules that do more than forward and backward.

`graphfsdp.optim.adapters` adapts optimizers.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import Change


class CapturableOptimizer(Protocol):
    """An optimizer whose step can be recorded once and replayed."""

    optimizers: tuple[torch.optim.Optimizer, ...]
    use_decoupled_grad: bool

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype: ...

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        """Refuse what cannot be stepped on, before anything runs.

        PrecisionError: a gradient would reach the optimizer as a casted copy. ConfigError: the
        optimizer cannot be captured; the message says what can.
        """

    def prepare_skipping(self, scope: Scope) -> None:
        """Get ready for steps that a tensor may skip, or raise ConfigError."""

    def step_by_groups(self) -> None:
        """Step on a CPU by an operator for each group, where that has the bits of the own step.

        Of most optimizers there is no such step.
        """
        return

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that were skipped so far; None if it counts none."""

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Step on the gradients that are bound now, each times ``grad_scale`` ([] float32).

        Unless ``found_inf`` ([] float32) is zero, nothing is changed; with None no step is skipped.
        Capture: no host sync; every address is fixed after the first call.
        """

    def stepping(self) -> AbstractContextManager[None]:
        """Run a body that calls ``step`` of the user's optimizer, which then steps as ours would.

        Capture: as ``step``.
        """

    def bake(self) -> None:
        """Remember the Python values that the recording is about to bake in."""

    def changes(self) -> Sequence[Change]:
        """Return what the recording has baked in and is not so any more; empty before ``bake``.

        What was loaded since is first taken over, in the tensors that the recording knows.
        Capture: nothing is recorded; called before guards are asked.
        """

    def before_replay(self) -> None:
        """Upload hyper-parameters that changed; ``changes`` has told of those that are baked."""

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""


class IterationPart(abc.ABC):
    """A module that has a part in an iteration beyond forward and backward."""

    @abc.abstractmethod
    def end_iteration(self) -> None:
        """Do what comes once an iteration, when all backward passes are over.

        Capture: no host sync.
        """


@runtime_checkable
class Restartable(Protocol):
    """An optimizer that knows the values with which its state begins."""

    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give entries of this optimizer's ``state`` the values of new state, in place."""
