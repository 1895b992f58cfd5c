"""Watches some iterations of a loop as they run, and judges whether a graph could hold one.

Note [Iterations of a script]: an iteration begins with the first call of a model that is trained,
and ends with the step of the last of its optimizers. The first one makes what is made once, and
shows which optimizers belong together; of it only what the loop itself reads is judged. The next
two are judged and compared. In some more ``capture_in_place`` shows what it makes of the loop. Then
the script ends.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.rules.refusals import running_optimizer
from graphfsdp._capture.trace.source import OpPhase, user_source_line
from graphfsdp._capture.undo.host_state import HostOptimizer, HostState
from graphfsdp.base.changes import ChangeKind
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog, SourceLine
from graphfsdp.base.op_tensors import as_written, storage_key
from graphfsdp.config import CaptureOptions
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.module_part import PartState
from graphfsdp.in_place.parts import Parts
from graphfsdp.optim.adapters.backends import JointOptimizer, UnsteppedOptimizer
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.preconditions import Trained, ignoring, inner_optimizer, one_module, prepare
from graphfsdp.preflight.advice import Advice, integration_of, names_of
from graphfsdp.preflight.judge import Findings
from graphfsdp.preflight.loop_watcher import LATER, LoopWatcher
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.trained import (
    owners_of,
    params_of,
    trains,
    trains_through,
)

Stop = Callable[[CheckReport], NoReturn]
_Models = Sequence[nn.Module]
_Optimizers = Sequence[torch.optim.Optimizer]
# From here on others have nothing to do with it; a critic steps less often than that by itself.
_MOST_STEPS_ALONE = 10
_NUM_COMPARED = 2
_LEAST_STEPS_IN_PARTS, _MOST_STEPS_IN_PARTS = 4, 12
_MOST_SECONDS_IN_PARTS = 60.0


class Script(Protocol):
    """Whose loop it is.

    Attributes:
        came_to: How far it has come.
        is_theirs: It calls ``capture_in_place`` itself.
        moved: Where a tensor was given other memory, by its id.
        thread: The one of the loop.
    """

    target: str
    came_to: str
    is_theirs: bool
    moved: dict[int, SourceLine | None]
    thread: int

    def stop(self, report: CheckReport) -> NoReturn:
        """End it."""


@dataclass
class _Judged:
    """One iteration that was watched to its end."""

    watcher: LoopWatcher
    begins: SourceLine | None
    ends: SourceLine | None
    forms: list[tuple[Any, ...]]  # of its inputs
    names: list[str]  # of these


class WatchedLoop:
    """The iterations of one loop."""

    def __init__(self, script: Script, models: _Models, optimizers: _Optimizers) -> None:
        self._script = script
        self._models = models
        self._wrappers = list(optimizers)
        self._hazards = HazardLog()
        self._early = HazardLog()  # reads of the first iteration
        self._of_settings = HazardLog()
        self._settings: Trained | None = None
        self._own = {id(each) for model in models for each in model.modules()}
        self._num = 0  # iterations that have begun
        self._begins_through = False  # with what another model has computed, to train that
        self._first_judged = 2
        self._stepped: list[torch.optim.Optimizer] = []
        self._judged: list[_Judged] = []
        self._watcher: LoopWatcher | None = None
        self._open = ExitStack()
        self._begins: SourceLine | None = None
        self._left: dict[str, _Gradient] = {}
        self._has_moved = False  # a number of an optimizer
        self._host_state: HostState | None = None
        self._host_optimizers: list[HostOptimizer] = []
        self._report: CheckReport | None = None
        self._advice: Advice | None = None
        self._parts: Parts | None = None
        self._num_in_parts = 0
        self._undo = ExitStack()
        self._replaces: bool | None = None  # of the step that runs now
        self._find_settings(self._of_settings)
        self._take_steps()

    @property
    def has_verdict(self) -> bool:
        return bool(self._judged or self._refused())

    def _refused(self) -> list[Hazard]:
        """Return what is wrong with models and optimizers by themselves."""
        return list(self._of_settings)

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [inner_optimizer(each, ignoring) for each in self._wrappers]

    @property
    def _together(self) -> nn.Module:
        return self._models[0] if len(self._models) == 1 else one_module(self._models)

    def _take_steps(self) -> None:
        for optimizer in self._optimizers:
            self._take_step(optimizer)

    def _take_step(self, optimizer: torch.optim.Optimizer) -> None:
        table = vars(optimizer)
        before = table.get("step")

        def restore() -> None:
            table.pop("step", None)
            if before is not None:
                table["step"] = before

        @wraps(optimizer.step)  # with the mark that schedulers look for
        def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            mine = table["step"]
            restore()  # adapters look there, too
            try:
                result = self._step(optimizer, args, kwargs)
            finally:
                table["step"] = mine
            self._on_stepped(optimizer)
            return result

        table["step"] = MethodType(call, optimizer)
        self._undo.callback(restore)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        adapter = None if self._settings is None else self._adapter_of(optimizer)
        is_replaced = type(adapter) is not BakedAdapter  # if there is none, that was told
        if self._watcher is None and adapter is not None and is_replaced and args:
            closure, *args = args  # which these call first
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                args = [lambda: loss, *args]
        before, self._replaces = self._replaces, is_replaced
        try:
            with ExitStack() as stack:
                if self._watcher is not None:
                    if adapter is not None and not is_replaced:
                        stack.enter_context(adapter.stepping())
                    stack.enter_context(self._watcher.stepping(is_replaced=is_replaced))
                return optimizer.step(*args, **kwargs)
        except CaptureError as error:  # what a graph could not hold of it; nobody trains here
            self._hazards.add(error.hazard)
            return None
        finally:
            self._replaces = before

    def _adapter_of(self, optimizer: torch.optim.Optimizer) -> Any:
        if self._settings is None or isinstance(self._settings.adapted, UnsteppedOptimizer):
            return None
        adapted = self._settings.adapted
        members = adapted.members if isinstance(adapted, JointOptimizer) else [adapted]
        return next((each for each in members if optimizer in each.optimizers), None)

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        """Begin an iteration with the call of a module, where it does; return what to run it in."""
        watcher, is_running = self._watcher, running_optimizer() is not None
        if id(module) not in self._own or self._report is not None:
            return nullcontext()
        if watcher is not None:
            is_evaluated = not (module.training or torch.is_grad_enabled())
            is_apart = is_evaluated and not watcher.calls_modules()
            return watcher.evaluating() if is_apart else nullcontext()
        # Of a step that was under way when this loop was found the end is not seen.
        is_seen = not is_running or self._replaces is not None
        if not (is_seen and trains(module)):
            return nullcontext()
        # A call that trains another model is none of an iteration, unless all of them do.
        is_through = trains_through(args, kwargs)
        if not self._num:
            self._script.came_to = "stepped no optimizer"
            self._begins_through = is_through
        if self._begins_through or not is_through:
            self._begin()
        return nullcontext()

    def _begin(self) -> None:
        self._num += 1
        is_judged = self._num >= self._first_judged
        if self._num == self._first_judged:
            self._find_settings(self._hazards)
        if self._num > self._first_judged:
            self._note_changes()
        self._begins = user_source_line()
        self._stepped = []
        together, device = self._together, self._device()
        hazards = self._hazards if is_judged else self._early
        self._watcher = LoopWatcher(
            together,
            device,
            hazards,
            for_cuda=self._script.target == "cuda",
            is_first=not is_judged,
            left=self._still_left(),
        )
        if is_judged:
            self._host_state = HostState(together, (), lambda: None)
            self._host_optimizers = [HostOptimizer(o, self._counts) for o in self._unknown()]
        self._open.enter_context(as_written())  # a dispatch mode would not see into compiled code
        self._open.enter_context(self._watcher.watching())
        if self._replaces is not None:  # it begins within a step
            self._open.enter_context(self._watcher.stepping(is_replaced=self._replaces))

    def _find_settings(self, hazards: HazardLog) -> None:
        noting = Findings(hazards).noting
        # Whose adapters have seen them step.
        adapted = None if self._settings is None else self._settings.adapted
        with noting(HazardKind.CONFIG):  # what leaves nothing to go on with
            self._settings = prepare(
                self._together, self._optimizers, CaptureOptions(), noting=noting, adapted=adapted
            )

    def _device(self) -> torch.device:
        if self._settings is not None:
            return self._settings.device
        return next(param.device for model in self._models for param in model.parameters())

    def _unknown(self) -> _Optimizers:
        """Return optimizers that are recorded as they are written."""
        known = self._optimizers
        return [each for each in known if type(self._adapter_of(each)) is BakedAdapter]

    def _counts(self, key: str) -> bool:
        return self._settings is not None and self._settings.adapted.counts(key)

    def _note_changes(self) -> None:
        """Note what has changed since the last iteration began, and a graph would not see."""
        watcher = self._judged[-1].watcher
        if self._host_state is not None:
            model = self._together
            named = [*model.named_parameters(), *model.named_buffers()]
            moved = self._script.moved
            lines = {f"{name!r}": moved.get(id(tensor)) for name, tensor in named}
            for error in self._host_state.changes(watcher.has_touched):
                hazard = error.hazard
                source = next((lines[name] for name in lines if name in hazard.why), None)
                if source is not None and any(source == known.source for known in self._hazards):
                    continue  # of another parameter, by the same line
                self._add(
                    replace(
                        hazard,
                        why=hazard.why.replace("the iteration", "the loop", 1),
                        source=source or hazard.source,
                    )
                )
        for change in self._settings.adapted.changes() if self._settings is not None else ():
            if change.kind is ChangeKind.BAKED_VALUE:
                self._has_moved = True
                self._add(
                    Hazard(
                        HazardKind.BAKED_NUMBER,
                        f"{change.name} was {change.old} in the iteration before, and is "
                        f"{change.new} now; each number would need a graph of its own",
                        change.remedy,
                        op=change.name,
                    )
                )

    def _add(self, hazard: Hazard) -> None:
        if all(
            (h.kind, h.source, h.why) != (hazard.kind, hazard.source, hazard.why)
            for h in self._hazards
        ):
            self._hazards.add(hazard)

    def _on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._parts is not None:
            self._on_step_in_parts(optimizer)
            return
        watcher = self._watcher
        if watcher is None or threading.get_ident() != self._script.thread:
            return
        self._stepped.append(optimizer)
        left = [each for each in self._optimizers if self._belongs(each, optimizer)]
        if any(all(each is not other for other in self._stepped) for each in left):
            return
        if self._num == 1:
            self._drop_others(left)
        self._end_iteration(watcher)

    def _belongs(self, other: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer steps in the iteration in which another one has stepped now."""
        if any(other is each for each in self._stepped):
            return True
        watcher = self._watcher
        assert watcher is not None
        is_alone = sum(each is optimizer for each in self._stepped) >= _MOST_STEPS_ALONE
        used = any(map(watcher.has_touched, params_of(other).values()))
        return used and not is_alone and not params_of(other).keys() & params_of(optimizer).keys()

    def _drop_others(self, kept: _Optimizers) -> None:
        if len(kept) == len(self._wrappers):
            return
        self._undo.close()
        self._wrappers = [
            o for o in self._wrappers if any(inner_optimizer(o, ignoring) is each for each in kept)
        ]
        self._models = owners_of(self._models, kept)
        self._own = {id(each) for model in self._models for each in model.modules()}
        self._of_settings = HazardLog()
        self._settings = None
        self._find_settings(self._of_settings)
        self._take_steps()

    def _end_iteration(self, watcher: LoopWatcher) -> None:
        self._watcher = None
        self._open.close()
        self._script.came_to = "stepped its optimizer once"
        named = (pair for model in self._models for pair in model.named_parameters())
        self._left = {
            name: _Gradient.of(param)
            for name, param in named
            if param.grad is not None and storage_key(param.grad)
        }
        if self._num < self._first_judged:
            if self._num == 1 and any(map(_has_numbers, self._unknown())):
                self._first_judged = 3  # in the second one it is seen which of these count
            return
        inputs = list(watcher.inputs.values())
        watcher.inputs.clear()
        self._judged.append(
            _Judged(
                watcher,
                self._begins,
                user_source_line(),
                [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs],
                names_of(*inputs, fallback="..."),
            )
        )
        for error in (each for known in self._host_optimizers for each in known.changes()):
            self._add(error.hazard)
        for name in watcher.added[:1]:
            self._add(_of_gradients(name))
        if self._settings is not None:
            self._settings.adapted.bake()
        if len(self._judged) == _NUM_COMPARED:
            self._note_differences(*self._judged)
            self._judge()
            self._show_parts()

    def _still_left(self) -> dict[int, str]:
        """Return gradients that nobody has zeroed, by the key of their storage."""
        left = {name: gradient.key() for name, gradient in self._left.items()}
        return {key: name for name, key in left.items() if key is not None}

    def _note_differences(self, one: _Judged, other: _Judged) -> None:
        """Note numbers that are others in the next iteration, though nothing else is."""
        if one.forms != other.forms:
            return
        told = {hazard.source for hazard in self._hazards}
        sites = other.watcher.sites.sites()
        is_state_told = any(hazard.kind is HazardKind.STATE for hazard in self._hazards)
        logs = [one.watcher.log, other.watcher.log]
        # What follows a read may be explained by it.
        num_known = min(each.watcher.num_unread for each in (one, other))
        for log in logs:
            log.entries = log.entries[:num_known]
        for each in logs[0].differences(logs[1]):
            site = None if each.site is None else sites[each.site]
            source = None if site is None else site.source
            if source in told and source is not None:
                continue  # where the number came from is told already
            if each.refusal.kind is HazardKind.STATE and is_state_told:
                continue  # by the name of what was replaced
            if self._has_moved and site is not None and site.phase is OpPhase.OPTIMIZER:
                continue  # by its name in param_groups
            told.add(source)
            found = CaptureError(
                each.refusal.message,
                op=each.op,
                module_path=None if site is None else site.module,
                source=source,
                kind=each.refusal.kind,
            )
            self._add(found.hazard)

    def _judge(self) -> None:
        """Make the report, but for what is seen in parts."""
        if not self._judged:
            self._report = CheckReport(
                tuple(self._refused()), str(self._device()), self._script.target
            )
            return
        last = self._judged[-1]
        begins = self._judged[0].begins
        found = list(self._hazards)
        told = {(hazard.kind, hazard.source) for hazard in found}
        found += [
            hazard
            for hazard in self._early
            if (hazard.kind, hazard.source) not in told and not _is_before(hazard.source, begins)
        ]
        integration = integration_of()
        if integration is not None:
            found = [hazard for hazard in found if not integration.holds(hazard.source)]
        step = f"{names_of(self._last_optimizer(), fallback='optimizer')[0]}.step()"
        later = LATER.replace("optimizer.step()", step)
        hazards = tuple(replace(h, fix=later) if h.fix == LATER else h for h in found)
        self._report = CheckReport(
            hazards, str(self._device()), self._script.target, last.watcher.num_inside
        )
        self._advice = Advice(
            models=_list_of(names_of(*self._models, fallback="model")),
            optimizers=_list_of(names_of(*self._in_order(), fallback="optimizer")),
            names=self._names_of_parts(),
            begins=last.begins,
            ends=last.ends,
            inputs=list(dict.fromkeys(last.names)),
            launches=last.watcher.launches(),
            has_other_shapes=len({str(each.forms) for each in self._judged}) > 1,
            is_theirs=self._script.is_theirs,
            integration=integration,
            beside=list(last.watcher.beside),
        )

    def _names_of_parts(self) -> dict[str, str]:
        """Return what the script calls what a report of parts names by place."""
        found = {}
        for kind, values in (("model", self._models), ("optimizer", self._wrappers)):
            for place, value in enumerate(values):
                known = f"{kind} {place}"
                found[known] = names_of(value, fallback=known)[0]
        found["model"] = found["model 0"]
        return found

    def _last_optimizer(self) -> torch.optim.Optimizer:
        return self._wrapper_of(self._stepped[-1])

    def _in_order(self) -> list[torch.optim.Optimizer]:
        known = [*self._stepped, *self._optimizers]
        return [self._wrapper_of(each) for each in {id(each): each for each in known}.values()]

    def _wrapper_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return next(o for o in self._wrappers if inner_optimizer(o, ignoring) is optimizer)

    def _show_parts(self) -> None:
        """Let the loop go on as ``capture_in_place`` would have it."""
        self._undo.close()
        self._parts = Parts(self._models, self._optimizers, keeps_all=True)
        self._began_parts = time.monotonic()
        self._take_steps()

    def _on_step_in_parts(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self._optimizers[0]:
            return
        self._num_in_parts += 1
        assert self._parts is not None
        lines = self._parts.report().parts
        is_settled = self._num_in_parts > _LEAST_STEPS_IN_PARTS and all(
            line.state != PartState.WARMUP.value for line in lines
        )
        is_late = time.monotonic() - self._began_parts > _MOST_SECONDS_IN_PARTS
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            is_settled = is_late = False  # all ranks end with the same step
        if is_settled or is_late or self._num_in_parts >= _MOST_STEPS_IN_PARTS:
            self.finish()

    def finish(self) -> NoReturn:
        """End the script with what was seen."""
        if self._report is None:
            self._judge()
        assert self._report is not None
        if self._advice is None:
            self._script.stop(self._report)
        parts = None if self._parts is None else self._parts.report()
        launches = self._advice.places()
        self._script.stop(
            replace(
                self._report, advice=self._advice.text(parts), parts=parts, launches=tuple(launches)
            )
        )

    def close(self) -> None:
        self._undo.close()
        if self._parts is not None:
            self._parts.close()
        if self._watcher is not None:
            self._watcher = None
            self._open.close()


@dataclass(frozen=True)
class _Gradient:
    """A gradient that an iteration has left."""

    param: Tensor
    ref: StorageWeakRef  # so that no other storage gets its key
    at: int  # its storage's key
    version: int

    @classmethod
    def of(cls, param: Tensor) -> "_Gradient":
        grad = param.grad
        assert grad is not None
        ref = StorageWeakRef(grad.untyped_storage())
        return cls(param, ref, storage_key(grad), grad._version)

    def key(self) -> int | None:
        """Return its storage's key; None if somebody has written it, or taken it off."""
        grad = self.param.grad
        if grad is None or storage_key(grad) != self.at or grad._version != self.version:
            return None
        return self.at


def _of_gradients(name: str) -> Hazard:
    return Hazard(
        HazardKind.STATE,
        f"gradients were not zeroed since the optimizer's last step, that of {name!r} for one; a "
        "captured iteration begins without any",
        "optimizer.zero_grad() in each iteration; graphfsdp.capture(microbatches=n) accumulates "
        "the gradients of n batches within one",
    )


def _has_numbers(optimizer: torch.optim.Optimizer) -> bool:
    values = (value for entries in optimizer.state.values() for value in entries.values())
    return any(isinstance(value, int | float) for value in values)


def _is_before(source: SourceLine | None, begins: SourceLine | None) -> bool:
    """Tell whether a line is passed before the loop, as by a first look at the model."""
    if source is None or begins is None or source.line >= begins.line:
        return False
    return (source.file, source.function) == (begins.file, begins.function)


def _list_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
