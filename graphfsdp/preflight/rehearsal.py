"""Runs one iteration several times from the same state, notes every hazard, leaves no trace."""

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.rules.constants import unseen_read
from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.source import user_line_of
from graphfsdp._capture.trace.values import dropped_tensors
from graphfsdp._capture.undo.host_state import HostState, generators_of
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog
from graphfsdp.base.op_tensors import as_written
from graphfsdp.errors import (
    CaptureError,
    GraphFSDPError,
    InvalidLossError,
    first_line,
    split_remedy,
)
from graphfsdp.preflight.watcher import MemorySums, PreflightWatcher

# A number that was read from a tensor differs from run to run by itself.
_READS = frozenset({HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE, HazardKind.GENERATOR})
_NUM_TRIES = 2


@dataclass
class Rehearsal:
    """Four runs of one iteration.

    Note [Runs of a rehearsal]: the first is not judged; it makes what is made once (optimizer
    state, caches). Memory is put back after it and after the second one, which is judged. The
    third starts from the same state: values that Python passes to operators and that differ come
    from Python alone (counters, clocks, random numbers). The fourth goes on from the third's end:
    values that differ now, though nothing was seen being read, were read out of a tensor's memory
    by a way that shows no call (an array that shares it, a C library).
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    gradients: PersistentGradients
    hazards: HazardLog
    device: torch.device
    for_cuda: bool
    optimizer: CapturableOptimizer

    def run(self, iterate: Callable[[], object]) -> int:
        """Return the number of operators."""
        runs: list[PreflightWatcher] = []
        found = generators_of(self.model, self.device)
        generators = [(each, each.get_state()) for each in found]

        def rewind() -> None:
            runs[-1].undo.roll_back()
            for generator, state in generators:
                generator.set_state(state)

        try:
            with as_written():  # a dispatch mode would not see into compiled regions
                failed = True
                for _ in range(_NUM_TRIES):  # a warning may be an error, but only once
                    if failed:
                        failed = self._attempt(runs, iterate, judged=False) is not None
                        rewind()
                if self._have_numbers():  # which a second step shows to be counts
                    self._attempt(runs, iterate, judged=False)
                    rewind()
                restore = self.gradients.save_bindings()
                state = HostState(self.model, self.optimizers, restore, self.optimizer.counts)
                error = self._attempt(runs, iterate, judged=True)
                judged = runs[-1]
                if error is not None:
                    self.hazards.add(hazard_of(error))
                    return judged.num_ops
                self._note_state(state, judged)
                if not failed:
                    rewind()
                    self._compare(runs, iterate)
                return judged.num_ops
        finally:
            for watcher in reversed(runs):
                watcher.undo.roll_back()

    def _have_numbers(self) -> bool:
        states = (entries for each in self.optimizers for entries in each.state.values())
        return any(isinstance(value, int | float) for e in states for value in e.values())

    def _attempt(
        self,
        runs: list[PreflightWatcher],
        iterate: Callable[[], object],
        *,
        judged: bool,
        sums: MemorySums | None = None,
    ) -> Exception | None:
        watcher = PreflightWatcher(
            self.model, self.device, self.hazards, for_cuda=self.for_cuda, sums=sums
        )
        runs.append(watcher)
        watcher.follow_streams()
        try:
            with watcher.watching(), nullcontext() if judged else watcher.quiet():
                iterate()
                if judged:
                    watcher.refuse_loose_streams()
        except Exception as error:  # whatever the user's program raises is a finding
            return error
        return None

    def _note_state(self, state: HostState, judged: PreflightWatcher) -> None:
        for change in state.changes(judged.has_touched):
            self.hazards.add(change.hazard)
        gc.collect()  # what only a cycle holds is not held
        for dropped in dropped_tensors(judged.storages):
            self.hazards.add(dropped.hazard)
        owners: dict[str, list[str]] = {}
        for name in self.gradients.without_gradient():
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        for owner, names in owners.items():
            self.hazards.add(_without_gradient(owner, names))

    def _compare(self, runs: list[PreflightWatcher], iterate: Callable[[], object]) -> None:
        second = runs[-1]
        self.optimizer.bake()
        self.optimizer.before_replay()
        sums = MemorySums(second.storages)
        error = self._attempt(runs, iterate, judged=False, sums=sums)
        if error is not None:
            # It ran a moment ago: of the rules only an optimizer's that is seen to count by now.
            if isinstance(error, CaptureError):
                self.hazards.add(error.hazard)
            return
        third = runs[-1]
        told = self._note_differences(second, third, None, set())
        third.note_hidden_writes()
        kinds = {hazard.kind for hazard in self.hazards}
        if kinds & _READS or HazardKind.CONTROL_FLOW in kinds:
            return
        if self._attempt(runs, iterate, judged=False) is None:
            self._note_differences(third, runs[-1], unseen_read, told)

    def _note_differences(
        self,
        before: PreflightWatcher,
        after: PreflightWatcher,
        reword: Callable[[Refusal], Refusal] | None,
        told: set[tuple[str, int | None]],
    ) -> set[tuple[str, int | None]]:
        """Return the places."""
        found = set()
        known = {h.source for h in self.hazards if h.kind is HazardKind.BAKED_NUMBER}
        sites = after.sites.sites()
        for each in before.constants.differences(after.constants):
            found.add((each.op, each.site))
            if (each.op, each.site) in told:
                continue
            if each.refusal.kind is HazardKind.STATE and self.hazards:
                continue  # what is told already may be why
            site = None if each.site is None else sites[each.site]
            if site is not None and site.source is not None and site.source in known:
                continue  # where the number came from is told already
            refusal = each.refusal if reword is None else reword(each.refusal)
            after.refuse_at(
                each.op,
                refusal,
                None if site is None else site.module,
                None if site is None else site.source,
            )
        return found


def _without_gradient(owner: str, names: list[str]) -> Hazard:
    shown = ", ".join(repr(name) for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return Hazard(
        HazardKind.GRADIENT,
        f"{shown}{more}: no gradient reached this in the iteration; the graph leaves it out, and "
        "will never train it, also when a later batch would",
        "requires_grad_(False) if it is not to be trained; else let it take part in every "
        "iteration",
        module_path=owner,
    )


def hazard_of(error: Exception) -> Hazard:
    if isinstance(error, CaptureError):
        return error.hazard
    if isinstance(error, InvalidLossError):
        return Hazard(HazardKind.LOSS, *split_remedy(error.message), source=error.source)
    source = user_line_of(error)
    if isinstance(error, GraphFSDPError):
        return Hazard(HazardKind.CONFIG, *split_remedy(str(error)), source=source)
    return Hazard(
        HazardKind.EXCEPTION,
        f"the iteration raises {first_line(error)}",
        "make the iteration run as it is first; what follows this line was not checked",
        op=type(error).__name__,
        source=source,
    )
