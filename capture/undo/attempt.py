"""An iteration that runs for real and must leave no trace if it fails."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from graphfsdp._capture.trace.backend import Undo
from graphfsdp._capture.undo.host_state import HostState, save_random_states


class Attempt:
    """A warm-up or a capture: everything that it may change, as it was before."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        undo: Undo,
        *,
        device: torch.device,
        restore_gradients: Callable[[], None],
    ) -> None:
        self.host_state = HostState(model, optimizers, restore_gradients)
        self._restore_random_states = save_random_states(model, device)
        self._undo = undo

    def watching(self) -> AbstractContextManager[None]:
        """Run the body so that it can be undone, also when it is over."""
        return self._undo.watching()

    def roll_back(self) -> None:
        """Put everything back.

        What Python objects refer to comes first: memory is written at the addresses that the
        model, the gradients and the optimizer had.
        """
        self.host_state.restore()
        self._undo.roll_back()
        self._restore_random_states()
