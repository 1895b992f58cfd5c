"""Lightning's training loop, with every training step as one graph.

Trainer(callbacks=[graphfsdp.integrations.lightning.CapturedTraining()])
"""

import sys
from typing import TYPE_CHECKING, Any

from graphfsdp.errors import ConfigError
from graphfsdp.in_place import capture_in_place
from graphfsdp.in_place.loop import InPlace
from graphfsdp.integrations import import_library

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    # Both names of the package may be installed, and their classes know nothing of each other.
    _names = ("lightning.pytorch", "pytorch_lightning")
    _library = import_library(
        *sorted(_names, key=lambda name: name not in sys.modules), install="pip install lightning"
    )
    Callback, LightningModule = _library.Callback, _library.LightningModule


class CapturedTraining(Callback):  # type: ignore[misc]
    """Trains a ``LightningModule`` with one graph launch for each step of its optimizers.

    All of Lightning's Python goes on running, and so do ``training_step``, hooks and callbacks;
    what they do with the modules in it is captured in place, as a whole
    (``graphfsdp.capture_in_place(..., whole=True)``): automatic and manual optimization,
    accumulation, clipping, schedules, bf16. Losses, logs,
    weights and checkpoints are bit for bit those without it. Between the first call of a module and
    the step nobody can read a loss or a gradient on the host; ``self.log`` need not.

    Refused by name: several devices, and 16-bit precision with a gradient scaler.
    """

    def __init__(self, **options: Any) -> None:
        """Take options of ``graphfsdp.capture_in_place(..., whole=True)``."""
        self._options = options
        self._loop: InPlace | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the calls of modules and of the optimizers' steps."""
        _refuse(trainer, pl_module)
        # The module itself notes things about its training while an iteration is under way.
        parts = list(pl_module.children())
        self._loop = capture_in_place(parts, trainer.optimizers, whole=True, **self._options)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the graphs back."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the graphs back."""
        self._close()

    def _close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


def _refuse(trainer: Any, module: Any) -> None:
    problem, remedy = None, ""
    if not isinstance(module, LightningModule):
        package = LightningModule.__module__.partition(".")[0]
        problem = f"is a callback of {package}, and {type(module).__name__} is of another package"
        remedy = "import lightning.pytorch or pytorch_lightning, not both"
    elif trainer.world_size > 1 or trainer.num_devices > 1:
        problem = f"trains on one device, and this trainer has {trainer.world_size}"
        remedy = "devices=1, or graphfsdp.fully_shard and graphfsdp.capture in a loop of your own"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        problem = "cannot capture a gradient scaler, which reads gradients on the host"
        remedy = "precision='bf16-mixed'"
    if problem is not None:
        raise ConfigError(f"CapturedTraining {problem}. Remedy: {remedy}")
