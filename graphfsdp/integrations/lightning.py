"""Lightning's automatic optimization, with every training step as one graph.

Trainer(callbacks=[graphfsdp.integrations.lightning.CapturedTraining()])
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from graphfsdp._capture.step import CapturedStep
from graphfsdp.api import capture
from graphfsdp.errors import ConfigError
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

# Called within the iteration that is recorded, of the module and of callbacks.
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
# What a module or callback may not replace, since the graph does it, and the way out.
_REFUSED = (
    ("optimizer_step", "a schedule with interval='step', or on_train_batch_end"),
    ("optimizer_zero_grad", "leave it out: gradients are overwritten, never zeroed"),
    ("on_before_zero_grad", "on_train_batch_start or on_train_batch_end"),
    ("backward", "a loss whose own backward does it"),
)
_Logged = tuple[str, str, tuple[tuple[str, Any], ...]]  # hook, name, options of self.log


class CapturedTraining(Callback):  # type: ignore[misc]
    """Trains a ``LightningModule`` with one graph launch for each batch.

    ``training_step``, backward, clipping, the hooks between them and the optimizer's step are
    recorded; what Lightning does around them (data, schedules, validation, loggers, checkpoints)
    runs as ever, and losses, weights and checkpoints are bit for bit those without it. Tensors
    that ``self.log`` is given in the recorded part are results of the graph, and are logged after
    each replay.

    Refused by name: manual optimization, several devices, 16-bit precision with a gradient
    scaler, a ``training_step`` that reads ``batch_idx``, ``self.log`` of numbers and of metrics
    with a state, and overrides of ``optimizer_step``, ``backward`` and the hooks of ``zero_grad``.
    """

    def __init__(self, **options: Any) -> None:
        """Take options of ``graphfsdp.capture``; default: ``on_change="recapture"``."""
        self._options = {"on_change": "recapture", **options}
        self._loop: Any = None
        self._step: CapturedStep | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the place of the loop's own forward, backward and step."""
        _refuse(trainer, pl_module)
        iteration = _Iteration(trainer, pl_module)
        self._step = capture(
            pl_module, trainer.optimizers[0], iteration=iteration.run, **self._options
        )
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._loop.run = _Run(trainer, self._loop, self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the graphs back."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the graphs back."""
        self._close()

    def _close(self) -> None:
        if self._step is not None:
            del self._loop.run
            self._step.close()
            self._step = None


class _Iteration:
    """What Lightning does between a batch and its optimizer's step."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._module = module
        self._hooks = {name: _hooks(trainer, module, name) for name in _HOOKS}
        self._context = trainer.precision_plugin.train_step_context
        self._clip = (trainer.gradient_clip_val, trainer.gradient_clip_algorithm)
        self._clips = bool(trainer.gradient_clip_val) or _is_own(
            module, LightningModule, "configure_gradient_clipping"
        )
        self._num_batches = trainer.accumulate_grad_batches
        self._sums: dict[str, Tensor] = {}

    def run(
        self,
        module: Any,
        optimizer: Any,
        batch: Any,
        names: tuple[str, ...],
        *,
        first: bool,
        last: bool,
    ) -> Any:
        arguments = {"batch": batch, "batch_idx": _NoIndex()}
        logged: dict[_Logged, Tensor] = {}
        with _logs_of(module, logged):
            with _inside(module, "training_step"), self._context():
                output = module.training_step(*(arguments[name] for name in names))
            results = dict(output) if isinstance(output, dict) else {"loss": output}
            if not isinstance(results.get("loss"), Tensor):
                raise ConfigError(
                    f"training_step returned {type(output).__name__} without a loss, which leaves "
                    "the step out; a graph always takes it. Remedy: return the loss, or a dict "
                    "with 'loss'"
                )
            loss = results["loss"] / self._num_batches
            self._call("on_before_backward", module, loss)
            loss.backward()
            if not (first and last):
                self._accumulate(module, first=first)
            self._call("on_after_backward", module)
            if last:
                self._call("on_before_optimizer_step", module, optimizer)
                if self._clips:
                    with _inside(module, "configure_gradient_clipping"):
                        module.configure_gradient_clipping(optimizer, *self._clip)
                optimizer.step()
        return results | {"loss": loss}, logged

    def _call(self, name: str, module: Any, *arguments: Any) -> None:
        with _inside(module, name):
            for hook in self._hooks[name]:
                hook(*arguments)

    def _accumulate(self, module: nn.Module, *, first: bool) -> None:
        """Add up gradients of several calls: each begins without any."""
        with torch.no_grad():
            for name, param in module.named_parameters():
                if param.grad is None:
                    if not first and name in self._sums:
                        raise ConfigError(
                            f"parameter {name!r} has a gradient in some of the batches that are "
                            "accumulated only. Remedy: accumulate_grad_batches=1"
                        )
                elif first:
                    if name not in self._sums:
                        self._sums[name] = torch.empty_like(param.grad)
                    self._sums[name].copy_(param.grad)
                else:
                    param.grad.copy_(self._sums[name].add_(param.grad))


class _Run:
    """Stands for ``run`` of Lightning's loop for automatic optimization."""

    def __init__(self, trainer: Any, loop: Any, step: CapturedStep) -> None:
        self._trainer = trainer
        self._progress = loop.optim_progress.optimizer
        self._step = step

    def __call__(self, optimizer: object, batch_idx: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        trainer, progress = self._trainer, self._progress
        first = batch_idx % trainer.accumulate_grad_batches == 0
        last = not trainer.fit_loop._should_accumulate()
        arguments = dict(kwargs)
        batch = arguments.pop("batch") if "batch" in arguments else arguments.pop("any")
        # The loop counts what it does, which checkpoints and schedules go by.
        counted = [progress.zero_grad] * first + [progress.step] * last
        for each in counted:
            each.increment_ready()
        names = tuple(name for name in kwargs if name in ("batch", "batch_idx"))
        results: dict[str, Any]
        results, logged = self._step(batch, names, first=first, last=last)
        for each in counted:
            if each is progress.zero_grad:
                each.increment_started()
            each.increment_completed()
        for (hook, name, options), value in logged.items():
            with _inside(trainer.lightning_module, hook):
                trainer.lightning_module.log(name, value, **dict(options))
        return results


class _NoIndex:
    """Stands for ``batch_idx``, which a replay would not move."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            "training_step reads batch_idx, which would stand still in every replay. Ways out: "
            "on_train_batch_start or on_train_batch_end, which get it as ever, or a buffer of the "
            "module that the step counts up"
        )

    __index__ = __int__ = __float__ = __bool__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __mod__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __floordiv__ = __str__ = __format__ = _refuse


@contextmanager
def _logs_of(module: Any, logged: dict[_Logged, Tensor]) -> Iterator[None]:
    """Take what the module logs in the body as results of the iteration."""

    def log(name: str, value: object, *args: Any, **options: Any) -> None:
        if not isinstance(value, Tensor) or args:
            raise ConfigError(
                f"self.log({name!r}) is given a {type(value).__name__} in training_step or in one "
                "of its hooks; every replay would log the same. Remedy: log a tensor by "
                "self.log(name, value, key=...), and numbers and metrics with a state in "
                "on_train_batch_end"
            )
        hook = module._current_fx_name
        logged[hook, name, tuple(sorted(options.items()))] = value

    vars(module)["log"] = log
    try:
        yield
    finally:
        del vars(module)["log"]


@contextmanager
def _inside(module: Any, hook: str) -> Iterator[None]:
    """Tell ``self.log`` which hook it is called in."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def _hooks(trainer: Any, module: Any, name: str) -> list[Callable[..., Any]]:
    def bound(callback: Any) -> Callable[..., Any]:
        return lambda *args: getattr(callback, name)(trainer, module, *args)

    callbacks = [bound(each) for each in trainer.callbacks if _is_own(each, Callback, name)]
    own = [getattr(module, name)] if _is_own(module, LightningModule, name) else []
    return [*callbacks, *own]


def _is_own(owner: Any, base: Any, name: str) -> bool:
    return getattr(type(owner), name, None) is not getattr(base, name, None)


def _refuse(trainer: Any, module: Any) -> None:
    problem, remedy = None, ""
    if not isinstance(module, LightningModule):
        package = LightningModule.__module__.partition(".")[0]
        problem = f"is a callback of {package}, and {type(module).__name__} is of another package"
        remedy = "import lightning.pytorch or pytorch_lightning, not both"
    elif not module.automatic_optimization:
        problem = "cannot capture manual optimization (automatic_optimization=False)"
        remedy = (
            "in on_train_start graphfsdp.capture_in_place(list(module.children()), "
            "trainer.optimizers), which leaves the loop as it is"
        )
    elif trainer.world_size > 1 or trainer.num_devices > 1:
        problem = f"trains on one device, and this trainer has {trainer.world_size}"
        remedy = "devices=1, or graphfsdp.fully_shard and graphfsdp.capture in a loop of your own"
    elif getattr(trainer.precision_plugin, "scaler", None) is not None:
        problem = "cannot capture a gradient scaler, which reads gradients on the host"
        remedy = "precision='bf16-mixed'"
    for base, owners in ((LightningModule, [module]), (Callback, trainer.callbacks)):
        for owner in owners:
            for name, way_out in _REFUSED:
                if problem is None and hasattr(base, name) and _is_own(owner, base, name):
                    problem = f"does by itself what {type(owner).__name__}.{name} replaces"
                    remedy = way_out
    if problem is not None:
        raise ConfigError(f"CapturedTraining {problem}. Remedy: {remedy}")
