"""Hugging Face's ``Trainer``, with every update of the weights as one graph.

from graphfsdp.integrations.transformers import CapturedTrainer as Trainer
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphfsdp._capture.step import CapturedStep
from graphfsdp.api import capture
from graphfsdp.errors import CaptureError, ConfigError
from graphfsdp.integrations import CapturesInParts, import_library
from graphfsdp.preconditions import inner_optimizer

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    _library = import_library("transformers", install="pip install transformers[torch]")
    Trainer, TrainerCallback = _library.Trainer, _library.TrainerCallback

# Settings that do something within an iteration which a replay would not do, and the way out.
_REFUSED = (
    ("torch_empty_cache_steps", "leave it out: a graph's memory is planned once"),
    ("deepspeed", "graphfsdp.fully_shard in a loop of your own"),
    ("fsdp", "graphfsdp.fully_shard in a loop of your own"),
    ("auto_find_batch_size", "choose per_device_train_batch_size: each trial would be captured"),
)
# What callbacks may not watch, since all microbatches and the step are over by then.
_TOO_LATE = ("on_pre_optimizer_step", "on_substep_end")
_IN_PARTS = (
    "the trainer without CapturedTrainer, with the callback CapturedTraining of this module, "
    "which refuses nothing"
)


class CapturedTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` that trains with one graph launch for each update of the weights.

    Forward and backward passes of all accumulated batches, clipping and the optimizer's step are
    recorded; what the Trainer does around them (data, schedules, logs, evaluation, checkpoints,
    callbacks) runs as ever, and losses, weights and checkpoints are bit for bit those of the
    ``Trainer``, but for an ``attention_mask`` that hides nothing: transformers looks on the host
    whether it does, and leaves it out, where a graph has attention with a mask, which may have
    other last bits (more in 16 bits). ``compute_loss`` of a subclass is in the graph. To capture
    another library's trainer, inherit from both: ``class Captured(CapturedTrainer, DPOTrainer)``.
    Where that has a ``training_step`` of its own, as TRL's have, it is called as ever, and the
    training is captured in parts (``CapturedTraining``).

    The passes of an update run together when its first batch is due, so callbacks that look
    between them (``on_pre_optimizer_step``, ``on_substep_end``) are refused by name, as are fp16
    with a gradient scaler, several devices, DeepSpeed and FSDP.

    On a GPU ``logging_nan_inf_filter=False`` spares a wait for the device after each batch.
    """

    def __init__(
        self, *args: Any, capture_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Take what ``Trainer`` takes.

        Args:
            *args: Of ``Trainer``.
            capture_options: Of ``graphfsdp.capture``; default: ``on_change="recapture"``, since
                the last batch of an epoch is often smaller.
            **kwargs: Of ``Trainer``.
        """
        super().__init__(*args, **kwargs)
        self._capture_options = {"on_change": "recapture", **(capture_options or {})}
        self._captured: _CapturedUpdate | None = None
        self._microbatches: list[Any] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``Trainer`` does; the graphs are given back at the end."""
        if self._steps_by_itself:
            callback = CapturedTraining()
            self.add_callback(callback)
            try:
                return super().train(*args, **kwargs)
            finally:
                self.remove_callback(callback)
        self._refuse()
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._captured is not None:
                self._captured.close()
                self._captured = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch the batches of one update, as ``Trainer`` does, and keep them for the graph."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._microbatches = list(batches)
        return batches, num_items

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """Return the loss of one batch; the first of an update runs the update as a whole."""
        if self._steps_by_itself:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch, **kwargs)
            return loss
        if self._captured is None:
            self._captured = _CapturedUpdate(self, model, self._capture_options)
        model.train()  # an evaluation may have been between
        if not self._captured.losses:
            batches = [self._prepare_inputs(batch) for batch in self._microbatches or [inputs]]
            self._captured.run(batches, num_items_in_batch)
        return self._captured.losses.pop(0)

    @property
    def _steps_by_itself(self) -> bool:
        """Whether a class between this one and ``Trainer`` has a ``training_step`` of its own."""
        order = type(self).__mro__
        between = order[order.index(CapturedTrainer) + 1 : order.index(Trainer)]
        return any("training_step" in vars(cls) for cls in between)

    def _refuse(self) -> None:
        for name, remedy in _REFUSED:
            if value := getattr(self.args, name, None):
                raise ConfigError(f"CapturedTrainer cannot do {name}={value!r}. Remedy: {remedy}")
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise ConfigError(
                f"CapturedTrainer trains on one device, and there are {self.args.world_size} "
                f"processes with {self.args.n_gpu} GPUs each. Ways out: CUDA_VISIBLE_DEVICES=0, "
                "or graphfsdp.fully_shard and graphfsdp.capture in a loop of your own"
            )
        late = _TOO_LATE if self.args.gradient_accumulation_steps > 1 else _TOO_LATE[:1]
        for callback in self.callback_handler.callbacks:
            for name in late:
                if getattr(type(callback), name, None) is not getattr(TrainerCallback, name, None):
                    raise ConfigError(
                        f"the callback {type(callback).__name__} has {name}, but in a captured "
                        "update nothing happens between backward passes and step. Ways out: "
                        f"on_step_end instead, or {_IN_PARTS}"
                    )


class CapturedTraining(CapturesInParts, TrainerCallback):  # type: ignore[misc]
    """Captures a ``Trainer`` of any class in parts, as ``graphfsdp.capture_in_place`` does.

    For trainers that have a ``training_step`` of their own (TRL's), and for callbacks that look
    between backward passes and step: ``Trainer(..., callbacks=[CapturedTraining()])``. Nothing is
    refused, and losses, weights and checkpoints are bit for bit those without it.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        """Take the place of the calls of modules and of the optimizer's step."""
        self._begin(model, optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the graphs back."""
        self._end()


class _CapturedUpdate:
    """One update of the weights as a captured step, and the Trainer's own calls left empty."""

    def __init__(self, trainer: Any, model: nn.Module, options: Mapping[str, Any]) -> None:
        # Losses of the batches of this update that the Trainer has not asked for yet.
        self.losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._optimizer = trainer.optimizer  # Accelerate's wrapper
        self._own_step = self._optimizer.step
        self._accelerator = trainer.accelerator
        # All that an iteration can name is looked through when it is captured, and the Trainer
        # holds the whole program. So only a loss function of the user's own is in its sight.
        context = _OutOfSight(trainer.compute_loss_context_manager)
        clip = _OutOfSight(self._accelerator.clip_grad_norm_)
        is_own = type(trainer).compute_loss is not Trainer.compute_loss
        compute_loss = trainer.compute_loss if is_own else _OutOfSight(trainer.compute_loss)
        loss_function = trainer.compute_loss_func  # is named, so that it is looked through
        optimizer = inner_optimizer(trainer.optimizer)
        max_norm = trainer.args.max_grad_norm or float("inf")
        is_normalized = getattr(trainer, "loss_is_scaled_for_ga", None)
        accepts_items = trainer.model_accepts_loss_kwargs

        def update(model: nn.Module, _: Any, batches: list[Any], num_items: Any) -> Any:
            losses = []
            for batch in batches:
                with context():
                    # It may take labels out of its batch, which must not leave the graph's.
                    loss = compute_loss(model, dict(batch), num_items_in_batch=num_items)
                by_items = (accepts_items and num_items is not None) or loss_function is not None
                if not (by_items if is_normalized is None else is_normalized):
                    loss = loss / len(batches)
                loss.backward()
                losses.append(loss)
            norm = clip(model.parameters(), max_norm)
            optimizer.step()
            return losses, norm

        self._step: CapturedStep = capture(model, trainer.optimizer, iteration=update, **options)
        # The Trainer clips and steps after the last batch: it gets the norm, and nothing happens.
        self._accelerator.clip_grad_norm_ = self._norm_of_update
        self._optimizer.step = functools.wraps(self._own_step)(_nothing)
        self._optimizer._opt_called = True  # schedules warn if they have not seen a step

    def run(self, batches: list[Any], num_items: Any) -> None:
        try:
            self.losses, self._norm = self._step(batches, num_items)
        except CaptureError as error:  # often in code of a library, which nobody can change
            error.add_note(f"Another way out: {_IN_PARTS}")
            raise

    def _norm_of_update(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._norm

    def close(self) -> None:
        self._step.close()
        del self._accelerator.clip_grad_norm_
        self._optimizer.step = self._own_step


class _OutOfSight:
    """A method that is called as ever, and whose object an iteration does not name."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        assert method is not None  # the Trainer is training
        return method(*args, **kwargs)


def _nothing(closure: object = None) -> None:
    """Do what is left to do of a step that the graph has taken."""
