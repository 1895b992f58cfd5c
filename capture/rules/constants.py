"""The Python values that go into an iteration's operators, and where two runs differ.

A number that differs between two iterations (a counter, a clock, an annealed weight) is one that
a replay would freeze without an error.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphfsdp._capture.rules.looks import without_looks_of_one_hot
from graphfsdp._capture.rules.refusals import Refusal, for_step_of, running_optimizer
from graphfsdp._capture.rules.watcher import Watcher, noting_code, watcher_here
from graphfsdp._capture.trace.landing import Redirection, Trace
from graphfsdp._capture.trace.source import (
    Ran,
    SiteTable,
    has_compiled,
    has_compiled_regions,
    may_compile,
)
from graphfsdp.base.op_tensors import OpCall, OperatorMode, storage_key
from graphfsdp.base.torch_internals import backward_node, without_modes
from graphfsdp.errors import CaptureError, HazardKind, Refuse, raised

_LOG = logging.getLogger("graphfsdp")
# From torch 2.14 on its compiler refuses by itself to compile in a capture.
COMPILES_IN_CAPTURE = "torch.compile cannot JIT compile during CUDA graph capture"
_LITERAL_BYTES = 1 << 20  # contents beyond this are not compared
_NUMBERS = (bool, int, str)
_INEXACT = (float, complex)
_LISTS = (list, tuple)
_FORMS = (torch.dtype, torch.device, torch.layout)

Steps = Counter[tuple[str, int]]  # by what an optimizer is called, and its id


class ConstantEntry(NamedTuple):
    """One operator call.

    Attributes:
        values: Its arguments that are no tensors, in order.
        site: Number of the place in the user's program.
        outside: Where each tensor lies that the run has not made itself; 0 for those that it has.
    """

    op: str
    values: tuple[Any, ...] = ()
    site: int = 0
    outside: tuple[int, ...] = ()


_NOTHING = ConstantEntry("nothing")


class ConstantLog:
    def __init__(self, given: Iterable[Tensor] = (), sites: SiteTable | None = None) -> None:
        """``given`` are inputs, which lie elsewhere in each run; ``sites`` has those of entries."""
        self.sites = sites
        self.entries: list[ConstantEntry] = []
        self.num_steps: Steps = Counter()
        self._made: set[int] = set(map(storage_key, given))  # storages

    def add(self, call: OpCall, places: Sequence[int], site: int) -> None:
        """``places`` are the keys of its tensors' storages before it ran."""
        values = _values([*call.args, *call.kwargs.values()])
        if call.is_literal:
            # A look at the contents is none of the iteration's operators.
            with without_modes():
                values.append(_contents(call.args[0]))
            self._made.update(places)  # anew in each run
        outside = tuple(0 if place in self._made else place for place in places)
        self.entries.append(ConstantEntry(call.name, tuple(values), site, outside))

    def add_results(self, call: OpCall, result: Any) -> None:
        """Note what the call that was added last has made."""
        self._made.update(key for _, key in call.made(result))

    def add_step(self, optimizer: torch.optim.Optimizer, site: int = 0) -> None:
        name = f"{type(optimizer).__name__}.step"
        self.entries.append(ConstantEntry(name, (), site))
        self.num_steps[name, id(optimizer)] += 1

    def differences(
        self, other: "ConstantLog", optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> Iterator[CaptureError]:
        """Yield why another run from the same state was given other values, each place once.

        The places are those of the other run, or of this one if nobody knows the other's. A step
        of ``optimizers`` without ``no_grad``, which computes on ``.data``, is compared as well.
        """
        told: set[tuple[str, int]] = set()
        pairs = itertools.zip_longest(self.entries, other.entries, fillvalue=_NOTHING)
        for mine, its in pairs:
            # Nearly all are; where Python's calls are watched, each call here would be, too.
            if mine.op == its.op and mine.values == its.values and mine.outside == its.outside:
                continue
            refusal = _difference(mine, its)
            if refusal is not None and (its.op, its.site) not in told:
                told.add((its.op, its.site))
                at, table = (mine, self.sites) if other.sites is None else (its, other.sites)
                site = None if table is None or at is _NOTHING else table.sites()[at.site]
                function = getattr(site and site.source, "function", "")
                for optimizer in optimizers:
                    classes = type(optimizer).__mro__
                    if any(function.startswith(f"{each.__qualname__}.") for each in classes):
                        refusal = for_step_of(optimizer, refusal)
                        break
                yield CaptureError(
                    refusal.message,
                    op=mine.op if its is _NOTHING else its.op,
                    module_path=None if site is None else site.module,
                    source=None if site is None else site.source,
                    kind=refusal.kind,
                )
            if mine.op != its.op:
                return


def _values(items: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if isinstance(item, _LISTS):
            found.append(len(item))
            found.extend(_values(item))
        elif isinstance(item, _INEXACT):
            found.append(repr(item))  # NaN is equal to itself
        elif isinstance(item, _NUMBERS) or item is None:
            found.append(item)
        elif isinstance(item, _FORMS):
            found.append(str(item))
    return found


def _contents(tensor: Tensor) -> Any:
    if tensor.numel() * tensor.element_size() > _LITERAL_BYTES or tensor.device.type != "cpu":
        return None
    numbers = str(tensor.tolist())
    if tensor.numel() <= 8:
        return numbers
    return f"{tensor.numel()} numbers (hash {hash(numbers)})"


def _difference(before: ConstantEntry, now: ConstantEntry) -> Refusal | None:
    if before.op != now.op:
        return Refusal(
            f"the iteration ran {before.op} in one run and {now.op} at the same point of the next "
            "one: a decision that Python takes anew each time (a counter, a clock, a random "
            "number); a replay repeats one path for ever",
            "decide on the device (torch.where), or outside the iteration with one captured step "
            "for each path",
            HazardKind.CONTROL_FLOW,
        )
    if before.values != now.values:
        pairs = zip(before.values, now.values, strict=False)
        was, is_now = next(((a, b) for a, b in pairs if a != b), (len(before.values), 0))
        return Refusal(
            f"{now.op} was given {was} in one run of the iteration and {is_now} in the next one, "
            "with nothing on the device to explain it: a Python value (a counter, a clock, a "
            "random number) that a replay would go on with unchanged",
            "keep it in a tensor that is changed in place (fill_, add_), pass it as a tensor of "
            "the batch, or draw it with torch.rand; one that soon stays as it is needs more "
            "warmup_steps",
            HazardKind.BAKED_NUMBER,
        )
    places = zip(before.outside, now.outside, strict=False)
    if any(was and is_now and was != is_now for was, is_now in places):
        return Refusal(
            f"{now.op} read a tensor in one run of the iteration and another one in the next, "
            "which the run has not made itself: one that Python keeps of the iteration before, or "
            "has replaced between them; every replay would read the same one again",
            "keep it in one tensor that is updated in place (copy_), a buffer for instance, or "
            "pass it as a tensor of the batch",
            HazardKind.STATE,
        )
    return None


def _fewer_steps(before: Steps, now: Steps) -> Iterator[CaptureError]:
    for (name, number), _ in (before - now).items():
        most, count = before[name, number], now[name, number]
        yield CaptureError(
            f"the iteration called {name} {count} times, and {most} times in a run before: a "
            "decision that Python takes anew each time; a replay repeats one path for ever. "
            "Remedy: step in every call: microbatches= of capture accumulates gradients, and "
            "skip_nonfinite leaves steps out; or one captured step for each path",
            kind=HazardKind.CONTROL_FLOW,
        )


class ConstantWatch:
    """What Python gave to the operators of the iteration before a capture.

    Attributes:
        failure: Why the last capture was refused here; None if it was not.
        ran: All Python code that ran in warm-ups and captures.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        has_run: bool = False,
        lands_in: Sequence[Tensor] = (),
        names_idle: bool = True,
        refuse: Refuse = raised,
    ) -> None:
        """The numbers of ``optimizers`` are live, or guarded: their operators are left out.

        Whether they step is not. ``has_run``: the iteration has run before, in a recording that
        was given up, say. ``lands_in``: all memory of gradients that a capture may compute there.
        """
        self.failure: CaptureError | None = None
        self.ran = Ran()
        self._model = model
        self._device = device
        self._optimizers = optimizers
        self._names_idle = names_idle
        self._refuse = refuse
        self._has_run = has_run
        self._lands_in = lands_in
        self._trace: Trace | None = None  # of the last warm-up, if a capture may land its products
        self._expected: ConstantLog | None = None
        self._is_settled = False
        # See Note [Compiled regions]: a warm-up that was watched was the first to run them.
        self._compiled_in_vain = False
        self._runs_compiled = False  # a capture has come to them
        self._most_steps: Steps = Counter()
        self._elsewhere: CaptureError | None = None

    @contextmanager
    def noting(self, *, is_first: bool, given: Iterable[Tensor] = ()) -> Iterator[None]:
        """Note what the iteration in the body does.

        ``is_first``: nothing like it has run before, so it may make what is made once. ``given``:
        inputs, which lie elsewhere in each run.
        """
        if self._may_run_compiled_code(is_first=is_first):
            self._expected = self._trace = None
            with self.ran.noting():
                yield
            return
        # What was made once is none of what a capture does.
        self._trace = Trace(self._device) if self._lands_in and not is_first else None
        log = ConstantLog(given)
        without_optimizer = bool(self._optimizers)
        with self.ran.noting(), noting_constants(log, without_optimizer, self._trace):
            yield
        self._expected, self._is_settled = log, not is_first
        self._most_steps |= log.num_steps
        self._compiled_in_vain = self._may_run_compiled_code(is_first=False)

    @contextmanager
    def comparing(self, given: Iterable[Tensor] = ()) -> Iterator[None]:
        """Compare the capture in the body with the iteration that was noted; raise at its end.

        If the capture fails, a next one is compared as well: with this one where it has come to
        its end, so that what was mended is not refused for ever, and else with the one before.
        """
        self.failure = None
        expected, follows_path = self._expected, self._is_settled
        watcher = watcher_here()  # none where compiled code runs
        if self._compiled_in_vain or (watcher is None and expected is not None):
            raise self._not_compiled()  # else a compiled region would be captured unwatched
        if expected is None:
            try:
                with noting_code(self.ran):
                    yield
            except RuntimeError as error:
                if watcher is None and COMPILES_IN_CAPTURE in str(error):
                    raise self._not_compiled() from error
                raise
            return
        trace = None
        if self._trace is not None:
            trace = Redirection(self._trace, self._lands_in, self._device)
        log = ConstantLog(given, None if watcher is None else watcher.sites)
        mode = _ConstantMode(log, bool(self._optimizers), watcher, trace)
        self._is_settled = False  # if it fails, somebody may mend it, and that is another path
        try:
            with noting_code(self.ran), mode:
                yield
            if trace is not None:
                trace.finish()
        except CaptureError as error:
            if trace is not None and error is trace.failure:
                self.failure = error
            raise
        self._expected, self._is_settled = log, True
        found = [*expected.differences(log, self._optimizers)]
        memory = next((each for each in found if each.kind is HazardKind.STATE), None)
        # Operators that only the first run has called shift all that follow: then a value was
        # compared with one of another place.
        is_aligned = all(each.kind is not HazardKind.CONTROL_FLOW for each in found)
        others = found if is_aligned or follows_path else []
        values = [each for each in others if each.kind is not HazardKind.STATE]
        fewer = list(_fewer_steps(self._most_steps, log.num_steps))
        self._most_steps |= log.num_steps
        self._elsewhere = memory if is_aligned else None
        for found_here in (*values, *fewer):
            self.failure = found_here
            self._refuse(found_here)
        self._name_idle(log)

    def _not_compiled(self) -> CaptureError:
        self._compiled_in_vain, self._runs_compiled, self._expected = False, True, None
        self.failure = CaptureError(
            "no warm-up has compiled what the capture runs of torch.compile, as it runs there. "
            "Remedy: one more of warmup_steps; and nothing that makes torch compile anew (a number "
            "that changes) between a warm-up and the capture",
            kind=HazardKind.CONTROL_FLOW,
        )
        return self.failure

    @property
    def log(self) -> ConstantLog | None:
        """What the last run that was noted or compared has done."""
        return self._expected

    def check_memory(self) -> None:
        """Refuse what read other memory; for when nobody knows better which tensor that is."""
        self.failure, self._elsewhere = self._elsewhere, None
        if self.failure is not None:
            self._refuse(self.failure)

    def _name_idle(self, log: ConstantLog) -> None:
        """Say which optimizers replays will never step: one that steps each fifth call, say."""
        stepped = {number for _, number in log.num_steps}
        for index, optimizer in enumerate(self._optimizers if self._names_idle else ()):
            if id(optimizer) not in stepped:
                _LOG.warning(
                    "optimizer %d (%s) takes no step in the captured iteration, so no replay will "
                    "step it. Should it step in some calls, capture another iteration for those",
                    index,
                    type(optimizer).__name__,
                )

    def _may_run_compiled_code(self, *, is_first: bool) -> bool:
        # See Note [Compiled regions]: nothing may watch them. On a CPU they are refused.
        return self._device.type != "cpu" and (
            self._runs_compiled
            or has_compiled_regions(self._model)
            or has_compiled()
            or (is_first and not self._has_run and may_compile())
        )


@contextmanager
def noting_constants(
    log: ConstantLog, without_optimizer: bool, trace: Trace | None = None
) -> Iterator[None]:
    """Note in ``log`` what the body does; ``without_optimizer``: but for what optimizers do."""
    with without_looks_of_one_hot(), _ConstantMode(log, without_optimizer, trace=trace):
        yield


class _ConstantMode(OperatorMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled regions run compiled: torch would otherwise give up on them for good."""
        return True

    def __init__(
        self,
        log: ConstantLog,
        without_optimizer: bool,
        watcher: Watcher | None = None,
        trace: Trace | None = None,
    ) -> None:
        """``watcher`` gives operators their sites, ``trace`` runs them."""
        super().__init__()
        self._log = log
        self._watcher = watcher
        self._trace = trace
        self.joins = trace is None  # which may call another operator instead
        self._without_optimizer = without_optimizer
        self._stepping: torch.optim.Optimizer | None = None

    def on_op(self, call: OpCall) -> Any:
        if call.op.namespace == "profiler":
            return call.run()
        places = call.keys  # as they are before it runs
        result = call.run() if self._trace is None else self._trace.run(call)
        site = 0 if self._watcher is None else self._watcher.site
        before, self._stepping = self._stepping, self._optimizer_left_out()
        if self._stepping is None:
            # How autograd keeps a result for its backward pass, where no hook does it instead.
            if call.op is not torch.ops.aten.detach.default:
                self._log.add(call, places, site)
        elif self._stepping is not before:
            self._log.add_step(self._stepping, site)
        self._log.add_results(call, result)
        return result

    def _optimizer_left_out(self) -> torch.optim.Optimizer | None:
        if not self._without_optimizer or torch.is_grad_enabled():
            return None
        in_backward = backward_node() is not None
        return None if in_backward else running_optimizer()
