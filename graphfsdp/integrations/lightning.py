"""Lightning's training loop, captured as far as it can be and it pays.

Trainer(callbacks=[graphfsdp.integrations.lightning.CapturedTraining()])
"""

from typing import TYPE_CHECKING, Any

from graphfsdp.in_place import capture_in_place
from graphfsdp.in_place.part_report import PartsReport
from graphfsdp.in_place.parts import Parts
from graphfsdp.integrations import import_library

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # A trainer of either calls the callbacks of both by their names.
    _names = ("lightning.pytorch", "pytorch_lightning")
    Callback = import_library(*_names, install="pip install lightning").Callback


class CapturedTraining(Callback):  # type: ignore[misc]
    """Captures the modules in a ``LightningModule``, and the steps of its optimizers.

    All of Lightning's Python goes on running, and so do ``training_step``, hooks and callbacks: the
    calls of the modules in it are captured in parts (``graphfsdp.capture_in_place``), as far as it
    pays. Automatic and manual optimization, accumulation, clipping, schedules and every precision
    are as ever, and losses, logs, weights and checkpoints bit for bit those without it. The one
    graph of a whole iteration is ``graphfsdp.capture`` in a loop of your own.

    Attributes:
        report: Of the parts, once the training is over; None before.
    """

    def __init__(self, **options: Any) -> None:
        """Take options of ``graphfsdp.capture_in_place``."""
        self._options = options
        self._loop: Parts | None = None
        self.report: PartsReport | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the calls of modules and of the optimizers' steps."""
        # The module itself notes things about its training in each call.
        parts = list(pl_module.children())
        self._loop = capture_in_place(parts, trainer.optimizers, **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the graphs back."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the graphs back."""
        self._close()

    def _close(self) -> None:
        if self._loop is not None:
            self.report = self._loop.report()
            self._loop.close()
            self._loop = None
