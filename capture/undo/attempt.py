"""An iteration that runs for real and must leave no trace if it fails."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.trace.backend import Effect, GraphBackend
from graphfsdp._capture.undo.host_state import HostState
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp._capture.undo.random_state import save_random_states
from graphfsdp.base.capturable import CapturableOptimizer

_TORN = (
    "the optimizer's step, the last thing in an iteration, failed after the rest of it had been "
    "kept: some parameters and their optimizer state may have been stepped and others not. "
    "Remedy: load model and optimizer from a checkpoint, close this step, and capture again; with "
    "undo_replays=True such a failure is undone, at the price of copies of weights and state"
)


class Attempt:
    """A warm-up or a capture: everything that it may change, as it was before.

    Attributes:
        host_state: Which tensors everybody held.
        effect: NONE as long as it can be undone; PART if what was held back has failed.
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
        self._undo = backend.begin_undo(_state(model, optimizer, gradients), gradients.unseen())
        self.effect = Effect.NONE

    def watching(self) -> AbstractContextManager[None]:
        """Run the body so that it can be undone, also when it is over."""
        return self._undo.watching()

    @contextmanager
    def keeping(self, *, waiting: Sequence[str], count: Callable[[], None]) -> Iterator[None]:
        """Run the body so that it can be undone, and then what has waited.

        Args:
            waiting: Operators that run last of all, and cannot be undone where copies for them
                would be large: fused steps of optimizers. See Note [Steps held back].
            count: Called when all of it stands.
        """
        with self._undo.watching(waiting=waiting):
            yield
        can_be_undone = self._undo.copy_for_waiting()
        if can_be_undone:
            self._undo.keep()
        with DeferredInterrupts():
            if not can_be_undone:
                self.effect = Effect.PART
                self._undo.forget()
                self._undo.keep()
            self.effect = Effect.ALL
            count()

    def breakage(self, error: BaseException) -> str:
        """Return why training cannot go on after an error, or "" if it can."""
        return f"{type(error).__name__}: {_TORN}" if self.effect is Effect.PART else ""

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
