"""Watches an iteration of a loop as it runs, and judges what a graph of it would hold.

Note [What is in the graph]: what the models compute that are trained, what touches their weights,
and what comes of either. All else that a loop does meanwhile (the next batch, a log, a network
without gradients) it does beside the graph, or hands it to the graph.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.rules.constants import ConstantLog
from graphfsdp._capture.rules.looks import all_masks
from graphfsdp._capture.rules.refusals import PYTHON_RANDOM, Refusal
from graphfsdp._capture.trace.source import (
    Site,
    frames,
    is_installed_file,
    user_source_line,
)
from graphfsdp._capture.trace.values import StorageInfo
from graphfsdp.base.dtensors import local_part
from graphfsdp.base.hazards import HazardKind, HazardLog, SourceLine
from graphfsdp.base.op_tensors import OpCall, flat_tensors, storage_key
from graphfsdp.base.torch_internals import backward_node
from graphfsdp.preflight.judge import READS, NotingWatcher

LATER = "put it behind optimizer.step()"
# What the loop may do between the model's call and the step, where no graph would be.
_BESIDE = frozenset({HazardKind.THREAD, HazardKind.HIDDEN_WRITE, HazardKind.MEMORY})
_LOADERS = "/torch/utils/data/"


class LoopWatcher(NotingWatcher):
    """Watches one iteration.

    Attributes:
        log: The numbers that operators in the graph were given, up to a read of a value of it.
        inputs: Tensors that the loop hands to it, by id, in order.
        beside: Where the loop reads what is none of the graph's.
        has_read: Such a value was read, which may explain all that follows.
        added: Names of parameters whose gradients were added to those of an earlier iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        hazards: HazardLog,
        *,
        for_cuda: bool,
        steps_as_written: Callable[[], bool | None],
    ) -> None:
        """``steps_as_written``: whether the step that runs now is recorded; None where none runs.

        It is not where a capture has one of its own in its place.
        """
        super().__init__(model, device, hazards, for_cuda=for_cuda)
        self.log = ConstantLog(sites=self.sites)
        self.inputs: dict[int, Tensor] = {}
        self.beside: dict[SourceLine, None] = {}
        self.added: list[str] = []
        self.has_read = False
        self._model = model
        self._steps_as_written = steps_as_written
        self._num_by_site: Counter[int] = Counter()
        params = dict(model.named_parameters())
        grads = {name: local_part(p.grad) for name, p in params.items() if p.grad is not None}
        own = [*map(local_part, (*params.values(), *model.buffers())), *grads.values()]
        # While such a reference is held, no other storage has the same key.
        self._own = {
            storage_key(t): StorageWeakRef(t.untyped_storage()) for t in own if storage_key(t)
        }
        # Gradients that nobody has zeroed.
        self._left = {
            storage_key(grad): name
            for name, grad in grads.items()
            if storage_key(grad) in self._own and bool(grad.any())
        }
        self._inside: set[StorageInfo | None] = set()
        self._is_held = False  # what runs now, by the graph
        self._is_evaluating = False

    def seal(self, result: Any) -> Any:
        """Return it as it is: the loop goes on with it."""
        return result

    def around_call(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return what to call a module in, by which the loop may look at a model on the way."""
        looks = self._tracker.path is None and not (module.training or torch.is_grad_enabled())
        is_own = looks and any(module is each for each in self._model.modules())
        return self._evaluating() if is_own else nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Watch in the body what the loop does with a model beside the graph."""
        before, self._is_evaluating = self._is_evaluating, True
        try:
            yield
        finally:
            self._is_evaluating = before

    def _as_written(self) -> bool | None:
        """Ask of the step that runs now; None as well in its closure."""
        is_closures = torch.is_grad_enabled() or backward_node() is not None
        return None if is_closures else self._steps_as_written()

    def _is_inside_here(self) -> bool:
        """Tell whether the Python that runs is all in the graph."""
        if self._is_evaluating:
            return False
        path = self._tracker.path
        is_of_model = path is not None and not path.startswith("<")
        return is_of_model or backward_node() is not None or self._as_written() is not None

    def _has_inside(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._own or self.storages.get(key) in self._inside

    @contextmanager
    def _judging(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Run what is given these tensors; a step in whose place a capture has its own is right."""
        touches = not self._is_evaluating and any(map(self._has_inside, tensors))
        before, self._is_held = self._is_held, touches or self._is_inside_here()
        try:
            with self.quiet() if self._as_written() is False else nullcontext():
                yield
        finally:
            self._is_held = before

    def dispatch(self, call: OpCall) -> Any:
        with self._judging(call.tensors):
            return super().dispatch(call)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        answer = all_masks(function, args, kwargs)  # as in a capture
        if answer is not NotImplemented:
            return answer
        with self._judging(flat_tensors([*args, *kwargs.values()])):
            return super().on_function(function, args, kwargs)

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        if not self._is_inside_here() and _is_beside(refusal):
            return
        with self._judging(()):
            self._is_held = True
            super().on_host_call(name, refusal)

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Note a refusal of what is in the graph."""
        is_loops = not self._is_inside_here()
        is_loops_read = is_loops and refusal.kind is HazardKind.HOST_READ
        if not self._is_held:
            source = user_source_line()
            if is_loops_read and source is not None and not is_installed_file(source.file):
                self.beside[source] = None
            return
        if is_loops_read:
            refusal = dataclasses.replace(refusal, remedy=LATER)
        self.has_read = self.has_read or refusal.kind in READS
        super().refuse(op, refusal)

    def on_op(self, call: OpCall) -> Any:
        if not self._is_held:
            return call.run()
        self._num_by_site[self.site] += 1
        if self._as_written() is None:  # numbers of a step are compared by its optimizer
            self._note_inputs(call)
            if not self.has_read:
                self.log.add(call, (0,) * len(call.keys), self.site)
        for tensor in call.written if self._left else ():
            name = self._left.pop(storage_key(tensor), None)
            if name is not None and backward_node() is not None:
                self.added.append(name)
        return call.run()

    def _note_inputs(self, call: OpCall) -> None:
        for tensor in call.tensors:
            if not (call.is_literal or self._has_inside(tensor)):
                self.inputs.setdefault(id(tensor), tensor)

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if self._is_held:
            held = [*flat_tensors([result]), *call.written]
            self._inside |= {self.storages.get(storage_key(tensor)) for tensor in held} - {None}

    def launches(self) -> list[tuple[Site, int]]:
        """Return how many operators in the graph each place of the program calls, in order."""
        sites = self.sites.sites()
        return [(sites[number], count) for number, count in sorted(self._num_by_site.items())]


def _is_beside(refusal: Refusal) -> bool:
    """Tell whether a loop may do so between the model's call and the step."""
    if refusal.kind in _BESIDE or refusal.remedy == PYTHON_RANDOM.remedy:
        return True
    loads = any(_LOADERS in frame.f_code.co_filename for frame in frames())
    return refusal.kind is HazardKind.GENERATOR and loads
