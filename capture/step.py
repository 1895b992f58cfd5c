"""The captured step: what users hold, and who may call it, when, and where."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.report.report import CaptureReport
from graphfsdp._capture.runner import Phase, Runner
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp.base.op_tensors import operator_modes
from graphfsdp.base.torch_internals import all_groups, num_dispatch_modes
from graphfsdp.config import CaptureOptions, at_least
from graphfsdp.errors import NotCopyableError, PhaseError, broken

ExampleBatch = tuple[tuple[Any, ...], dict[str, Any]]


class CapturedStep:
    """One training iteration per call: eagerly at first, then as one graph launch.

    Made by ``graphfsdp.capture``. A context manager; leaving it closes it.
    """

    def __init__(
        self, engine: Engine, options: CaptureOptions, example: ExampleBatch | None = None
    ) -> None:
        self._engine = engine
        self._runner = Runner(engine, options)
        if example is not None:
            try:
                self._runner.capture_ahead(*example)
            except BaseException:  # nobody will ever hold this step, so nobody can close it
                self._runner.release()
                raise
        self._lock = threading.Lock()  # of the call that is under way
        self._owner: int | None = None  # the thread of that
        self._pid = os.getpid()
        # Before torch is taken apart; what ends earlier releases itself. Nothing here may hold the
        # runner: a model that refers to its step would live for ever.
        weakref.finalize(self, _release, weakref.ref(self._runner))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Train on one batch.

        Args:
            *args: The batch, as ``loss_fn`` takes it after the model: tensors, nested in whatever
                torch's pytree knows and in dataclasses. What ``loss_fn`` writes into a tensor of
                the batch, in place, is there afterwards where the batch lies on the model's
                device; what it puts into a container of the batch is refused.
            **kwargs: Likewise. Values that are no tensors must be equal in every call.

        Returns:
            What ``loss_fn`` returned, detached, in tensors that are the caller's to keep.

        Raises:
            BatchMismatchError: the batch is unlike the first one.
            CaptureError: the iteration cannot be captured, or another rank failed.
            GuardError: something that the graph has baked in was changed, or the model was cast,
                moved or changed after ``capture``.
            RankFailedError: another rank failed in this replay; it is named. If it has raised a
                BatchMismatchError or a GuardError, so do all.
            VerificationError: with ``verify=n``: a replay is not what an eager run does.
            PhaseError: the step is closed or broken, is running already (on another thread, or
                in its own ``loss_fn``), or belongs to another process.

        Whatever a warm-up or a capture raises, parameters, buffers, gradients, optimizer state
        and generators are as they were before the call. A replay that fails before it has begun
        to update weights is undone too, but for the gradients, which are None then; one that
        fails later leaves the step broken, and the way back is the last checkpoint. An audited
        call that fails leaves what a loop without a graph would have left.

        Ctrl-C (SIGINT) and SIGTERM wait until a replay is over. In an iteration that runs as
        written, also while it is captured, they come as in any loop: forward and backward end
        where they are, and a warm-up or a capture is undone.
        """
        return self._alone(self._runner.run, args, kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass alone, in evaluation mode, without gradients.

        May be called between training steps in any order, with batches of any shapes: each kind
        gets a graph of its own, in the same memory pool, when it comes for the second time
        (``max_graphs`` of them at a time). Afterwards every module is in the mode that it was in,
        and generators and gradients are untouched: training goes on bit for bit as without it.
        Where something has changed since the graph was made, another is made.

        Args:
            *args: The batch, as ``loss_fn`` takes it after the model.
            **kwargs: Likewise.

        Returns:
            What ``loss_fn`` returned, in tensors that are the caller's to keep; of several
            microbatches the mean loss, as in training.

        Raises:
            CaptureError: the forward pass cannot be captured, or another rank failed.
            PhaseError: as for a training step.
        """
        return self._alone(self._runner.evaluate, args, kwargs)

    def verify(self, num_iterations: int = 1) -> None:
        """Prove that a replay does what the same Python does eagerly, and change nothing.

        On the last batch, from the present state: each iteration runs eagerly and by replay, and
        results, gradients, buffers, optimizer state, parameters and generators are compared bit
        for bit. Then everything is put back, so that training goes on as if nothing had been.
        What the iteration moves in Python beside the model (a counter of the loss function's) goes
        on meanwhile, as in any eager run. Where there are several ranks, all must call it.

        Args:
            num_iterations: Iterations, one following from the other.

        Raises:
            VerificationError: something differs; it names the first tensor, and the size of the
                difference.
            GuardError: something has changed that the graph has baked in.
            PhaseError: there is no graph yet.
        """
        at_least("num_iterations", num_iterations, 1)
        self._alone(self._runner.verify, num_iterations)

    @property
    def phase(self) -> Phase:
        """What the next call does."""
        return self._runner.phase

    @property
    def microbatches(self) -> int:
        """Equal parts that the next batch is split into; may be set.

        A graph is made for one number: see ``on_change`` of ``capture`` for what follows.
        """
        return self._runner.num_microbatches

    @microbatches.setter
    def microbatches(self, value: int) -> None:
        at_least("microbatches", value, 1)
        self._runner.num_microbatches = value

    @property
    def grad_norm(self) -> Tensor | None:
        """[] float32 global gradient norm of the last call, before clipping.

        None before the first call and without ``max_grad_norm``. Each call makes a new tensor.
        """
        return self._engine.grad_norm

    @property
    def skipped_steps(self) -> Tensor | None:
        """[] float32 number of optimizer steps left out, for a gradient that was not finite.

        None for an optimizer that counts none: torch's without ``skip_nonfinite``. Each look
        makes a new tensor, and reads nothing on the host.
        """
        return self._engine.skipped_steps

    def report(self) -> CaptureReport:
        """Return the facts of this step."""
        with DeferredInterrupts():
            return self._runner.report()

    def close(self) -> None:
        """Give graph and static inputs back and unhook the parameters; idempotent.

        Gradients stay bound to the persistent buffers until the next ``zero_grad``. In a forked
        child nothing of the step is this process's to give back, and nothing happens.
        """
        if self._runner.phase is Phase.CLOSED or os.getpid() != self._pid:
            return
        self._alone(self._runner.release, what="closed")

    def _alone(self, run: Callable[..., Any], *args: Any, what: str = "called") -> Any:
        """Run what belongs to a call, while no other one does, where it may be called at all."""
        with DeferredInterrupts():
            self._take_turn(what)
            try:
                if what == "called":
                    self._refuse_misuse()
                return run(*args)
            finally:
                self._owner = None
                self._lock.release()

    def _take_turn(self, what: str) -> None:
        """PhaseError if another call is under way, or this is a forked child."""
        if os.getpid() != self._pid:
            raise PhaseError(
                f"the captured step of process {self._pid} was {what} in its forked child "
                f"{os.getpid()}; a graph belongs to the process that made it. Remedy: make the "
                "step in the process that trains, after the fork"
            )
        if not self._lock.acquire(blocking=False):
            if self._owner == threading.get_ident():
                raise PhaseError(
                    f"the captured step was {what} inside its own iteration. Remedy: loss_fn and "
                    "the model must not call the step"
                )
            raise PhaseError(
                f"the captured step was {what} on one thread while it runs on another; both would "
                "write the same inputs, gradients and weights. Remedy: one thread trains, or a "
                "lock around the call"
            )
        self._owner = threading.get_ident()

    def _refuse_misuse(self) -> None:
        """Refuse a step that is closed or broken, inference mode, a capture, a destroyed group."""
        runner = self._runner
        if runner.phase is Phase.CLOSED:
            raise PhaseError("this captured step is closed. Remedy: capture again")
        if runner.phase is Phase.BROKEN:
            raise broken(runner.breakage)
        groups = self._engine.ranks.groups
        if groups and any(group not in all_groups() for group in groups):
            raise PhaseError(
                "the captured step was called after destroy_process_group, and the model is "
                "sharded over a group that was destroyed. Remedy: step.close() first, then "
                "destroy_process_group(); for another group shard the model and capture anew"
            )
        if torch.is_inference_mode_enabled():
            raise PhaseError(
                "the captured step was called under torch.inference_mode, where nothing can be "
                "trained. Remedy: call it outside (torch.no_grad is fine)"
            )
        inside = runner.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if num_dispatch_modes():
            # Those that look on are a warm-up's or a capture's.
            inside = inside or any(mode.joins for mode in operator_modes())
        if inside:
            raise PhaseError(
                "the captured step was called inside the iteration of another one, or while a CUDA "
                "graph is captured; an iteration cannot hold another. Remedy: call the steps one "
                "after the other"
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise NotCopyableError(
            "a captured step cannot be pickled or copied: its graph is bound to the addresses of "
            "this model in this process. Remedy: save or copy the model and the optimizer "
            "(state_dict()), and capture the copy"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _release(runner: "weakref.ref[Runner]") -> None:
    living = runner()
    if living is not None:
        living.release()
