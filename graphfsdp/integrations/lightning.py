"""Lightning's training loop, captured as far as it can be and it pays.

Trainer(callbacks=[graphfsdp.integrations.lightning.CapturedTraining()])
"""

from typing import TYPE_CHECKING, Any

from graphfsdp.integrations import CapturesInParts, import_library

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # A trainer of either calls the callbacks of both by their names.
    _names = ("lightning.pytorch", "pytorch_lightning")
    Callback = import_library(*_names, install="pip install lightning").Callback


class CapturedTraining(CapturesInParts, Callback):  # type: ignore[misc]
    """Captures the modules in a ``LightningModule``, and the steps of its optimizers.

    All of Lightning's Python goes on running, and so do ``training_step``, hooks and callbacks: the
    calls of the modules in it are captured in parts (``graphfsdp.capture_in_place``), as far as it
    pays. Automatic and manual optimization, accumulation, clipping, schedules and every precision
    are as ever, and losses, logs, weights and checkpoints bit for bit those without it. The one
    graph of a whole iteration is ``graphfsdp.capture`` in a loop of your own.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with what is in the module, which itself notes things about its training."""
        self._begin(list(pl_module.children()), trainer.optimizers)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the graphs back."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the graphs back."""
        self._end()
