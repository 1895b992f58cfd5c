"""An iteration that runs for real and must leave no trace if it fails."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor, nn

from graphfsdp._capture.backend import GraphBackend
from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.host_state import HostState
from graphfsdp._capture.random_state import save_random_states
from graphfsdp.capturable import CapturableOptimizer


class Attempt:
    """A warm-up or a capture: everything that it may change, as it was before.

    Attributes:
        host_state: Which tensors everybody held.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: CapturableOptimizer,
        gradients: PersistentGradients,
        backend: GraphBackend,
    ) -> None:
        """Remember the present state."""
        self.host_state = HostState(model, optimizer.optimizers, gradients)
        self._restore_random_states = save_random_states(model, backend.device)
        self._undo = backend.begin_undo(_state(model, optimizer, gradients))

    def watching(self) -> AbstractContextManager[None]:
        """Run the body so that it can be undone."""
        return self._undo.watching()

    def roll_back(self) -> None:
        """Put everything back.

        What Python objects refer to comes first: memory is written at the addresses that the
        model, the gradients and the optimizer had.
        """
        self.host_state.restore()
        self._undo.roll_back()
        self._restore_random_states()


def _state(
    model: nn.Module, optimizer: CapturableOptimizer, gradients: PersistentGradients
) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from (param.grad for param in model.parameters() if param.grad is not None)
    yield from gradients.storages()
    yield from (tensor for _, tensor in optimizer.state_tensors())


__all__ = ["Attempt"]
