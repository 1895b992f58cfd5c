"""Watches an iteration of a loop as it runs, and judges what a graph of it would hold.

Note [What is in the graph]: what the models compute that are trained, what touches their weights,
and what comes of either. All else that a loop does meanwhile (the next batch, a log, a network
without gradients) it does beside the graph, or hands it to the graph.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.rules.constants import ConstantLog
from graphfsdp._capture.rules.refusals import PYTHON_RANDOM, Refusal
from graphfsdp._capture.trace.source import (
    Site,
    frames,
    is_installed_file,
    user_source_line,
)
from graphfsdp._capture.trace.values import StorageInfo
from graphfsdp.base.hazards import HazardKind, HazardLog, SourceLine
from graphfsdp.base.op_tensors import OpCall, flat_tensors, storage_key
from graphfsdp.base.torch_internals import backward_node
from graphfsdp.preflight.judge import NotingWatcher

LATER = "put it behind optimizer.step()"
# What the loop may do between the model's call and the step, where no graph would be.
_BESIDE = frozenset({HazardKind.THREAD, HazardKind.HIDDEN_WRITE, HazardKind.MEMORY})
_READS = (HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE, HazardKind.GENERATOR)
_LOADERS = "/torch/utils/data/"


class LoopWatcher(NotingWatcher):
    """Watches one iteration.

    Attributes:
        log: The numbers that operators in the graph were given.
        inputs: Tensors that the loop hands to it, by id, in order.
        num_inside: Operators in the graph.
        num_unread: Entries of the log until a value of the graph was read.
        beside: Where the loop reads what is none of the graph's.
        added: Names of parameters whose gradients were added to those of an earlier iteration.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        hazards: HazardLog,
        *,
        for_cuda: bool,
        is_first: bool,
        left: Mapping[int, str],
    ) -> None:
        """``is_first``: only reads of the loop itself are judged, not what is made once.

        ``left``: gradients that nobody has zeroed, by the key of their storage.
        """
        super().__init__(model, device, hazards, for_cuda=for_cuda)
        self.log = ConstantLog()
        self.inputs: dict[int, Tensor] = {}
        self.added: list[str] = []
        self.beside: dict[SourceLine, None] = {}
        self.num_inside = 0
        self.num_unread = sys.maxsize
        self._num_by_site: Counter[int] = Counter()
        self._is_first = is_first
        self._left = dict(left)
        own = [*model.parameters(), *model.buffers()]
        own += [param.grad for param in model.parameters() if param.grad is not None]
        # While such a reference is held, no other storage has the same key.
        self._own = {
            storage_key(t): StorageWeakRef(t.untyped_storage()) for t in own if storage_key(t)
        }
        self._inside: dict[int, StorageInfo] = {}  # by id
        self._is_judged = False  # what runs now
        self._is_stepping = False  # an optimizer that is recorded as it is written
        self._is_replaced = False  # one that a capture steps by operators of its own
        self._is_evaluating = False

    def seal(self, result: Any) -> Any:
        """Return it as it is: the loop goes on with it."""
        return result

    @contextmanager
    def stepping(self, *, is_replaced: bool) -> Iterator[None]:
        """Watch the step of an optimizer in the body."""
        self._is_stepping, self._is_replaced = not is_replaced, is_replaced
        try:
            if is_replaced:
                with self.quiet():
                    yield
            else:
                yield
        finally:
            self._is_stepping = self._is_replaced = False

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Watch in the body what the loop does with a model beside the graph."""
        before, self._is_evaluating = self._is_evaluating, True
        try:
            yield
        finally:
            self._is_evaluating = before

    @contextmanager
    def _judging(self, is_judged: bool) -> Iterator[None]:
        before, self._is_judged = self._is_judged, is_judged
        try:
            yield
        finally:
            self._is_judged = before

    def _is_inside_here(self) -> bool:
        """Tell whether the Python that runs is all in the graph."""
        if self._is_evaluating:
            return False
        path = self._tracker.path
        is_of_model = path is not None and not path.startswith("<")
        return is_of_model or self._is_stepping or backward_node() is not None

    def _touches(self, tensors: Iterable[Tensor]) -> bool:
        return not self._is_evaluating and any(map(self._has_inside, tensors))

    def calls_modules(self) -> bool:
        """Tell whether some module runs now."""
        return self._tracker.path is not None

    def _has_inside(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        return key in self._own or id(self.storages.get(key)) in self._inside

    def dispatch(self, call: OpCall) -> Any:
        with self._judging(self._is_inside_here() or self._touches(call.tensors)):
            return super().dispatch(call)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        is_judged = self._is_inside_here() or self._touches(flat_tensors([*args, *kwargs.values()]))
        with self._judging(is_judged):
            return super().on_function(function, args, kwargs)

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        if not self._is_inside_here() and _is_beside(refusal):
            return
        with self._judging(True):
            super().on_host_call(name, refusal)

    def refuse(self, op: str, refusal: Refusal) -> None:
        """Note a refusal of what is in the graph."""
        is_read = refusal.kind is HazardKind.HOST_READ
        is_loops = not self._is_inside_here()
        if not self._is_judged:
            source = user_source_line()
            if is_read and source is not None and not is_installed_file(source.file):
                self.beside[source] = None
            return
        if self._is_first and not (is_read and is_loops):
            return
        if is_read and is_loops:
            refusal = dataclasses.replace(refusal, remedy=LATER)
        if refusal.kind in _READS:
            self.num_unread = min(self.num_unread, len(self.log.entries))
        super().refuse(op, refusal)

    def on_op(self, call: OpCall) -> Any:
        if self._is_replaced:
            self._count()
        elif self._is_judged:
            self._count()
            places = [key if key in self._own else 0 for key in call.keys]
            self.log.add(call, places, self.site)
            self._note_inputs(call)
            self._note_sums(call)
        return call.run()

    def _count(self) -> None:
        self.num_inside += 1
        self._num_by_site[self.site] += 1

    def _note_inputs(self, call: OpCall) -> None:
        for tensor in call.tensors:
            if not (call.is_literal or self._has_inside(tensor)):
                self.inputs.setdefault(id(tensor), tensor)

    def _note_sums(self, call: OpCall) -> None:
        for tensor in call.written if self._left else ():
            name = self._left.pop(storage_key(tensor), None)
            if name is not None and backward_node() is not None:
                self.added.append(name)

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if not (self._is_judged or self._is_replaced):
            return
        if not self._is_replaced:
            self.log.add_results(call, result)
        for tensor in (*flat_tensors([result]), *call.written):
            info = self.storages.get(storage_key(tensor))
            if info is not None:
                self._inside[id(info)] = info

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
