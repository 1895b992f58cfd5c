"""What a capture asks of an optimizer; `graphfsdp.optim.adapters` adapts optimizers to it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from graphfsdp.base.changes import Change
from graphfsdp.config import MixedPrecisionPolicy, Scope


class CapturableOptimizer(Protocol):
    """An optimizer whose step can be recorded once and replayed.

    Attributes:
        optimizers: The user's optimizer objects.
        use_decoupled_grad: It reads ``param.decoupled_grad`` instead of ``param.grad``.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    use_decoupled_grad: bool

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
        """Return the dtype that the persistent gradient of ``param`` has under ``policy``."""

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        """Refuse what this optimizer cannot step on, before anything runs.

        Args:
            named_params: Every trainable parameter by its full name.
            policy: Precision of the main weights and main grads.
            scope: The optimizer is inside the graph only for ``FULL_ITERATION``.

        Raises:
            PrecisionError: a gradient would reach the optimizer as a casted copy.
            ConfigError: the optimizer cannot be captured; the message says what can.
        """

    def prepare_skipping(self, scope: Scope) -> None:
        """Get ready for steps that a tensor may skip, or raise ConfigError."""

    def skipped_steps(self) -> Tensor | None:
        """Return [] float32, the steps that were skipped so far; None if it counts none."""

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Run one optimizer step on the gradients that are bound now.

        Args:
            grad_scale: [] float32, multiplies every gradient (the clip coefficient), or None.
            found_inf: [] float32; unless it is zero, nothing is changed. None: never skip.

        Capture: no host sync; every address is fixed after the first call.
        """

    def bake(self) -> None:
        """Remember the Python values that the recording is about to bake in."""

    def changes(self) -> Sequence[Change]:
        """Return what the recording has baked in and is not so any more; empty before ``bake``."""

    def before_replay(self) -> None:
        """Upload hyper-parameters that changed; refuse a change of a baked one.

        Raises:
            GuardError: a value that the recording has baked in was changed; it is named.
        """

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every persistent tensor of the optimizer with a name for messages."""


@runtime_checkable
class Restartable(Protocol):
    """An optimizer that knows the values with which its state begins."""

    def restart_states(self, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Give entries of this optimizer's ``state`` the values of new state, in place."""


@runtime_checkable
class Classed(Protocol):
    """An optimizer that steps parameters with equal step counts as one.

    Attributes:
        step_classes: Numbers that are equal only for parameters whose step counts are equal, and
            stay so in every recorded iteration; another dict when they change.
    """

    step_classes: dict[Tensor, int]
