"""Watches some iterations of a loop as they run, and judges whether a graph could hold one.

Note [Iterations of a script]: an iteration begins with the first call of a model that is trained,
and ends with the step of the last of its optimizers. The first one makes what is made once, and
shows which optimizers belong together; of it only what the loop itself reads is judged. The next
two are judged and compared. In some more ``capture_in_place`` shows what it makes of the loop. Then
the script ends.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from types import MethodType
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp._capture.rules.refusals import running_optimizer
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp._capture.undo.host_state import HostOptimizer, HostState
from graphfsdp.base.changes import ChangeKind
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog, SourceLine
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.torch_internals import is_in_backward, tree_leaves
from graphfsdp.config import CaptureOptions
from graphfsdp.errors import CaptureError
from graphfsdp.in_place.module_part import PartState
from graphfsdp.in_place.parts import Parts
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.preconditions import Trained, ignoring, inner_optimizer, one_module, prepare
from graphfsdp.preflight.advice import Advice, integration_of, names_of
from graphfsdp.preflight.judge import Findings, members_of
from graphfsdp.preflight.loop_watcher import LATER, LoopWatcher
from graphfsdp.preflight.report import CheckReport

# From here on others have nothing to do with it; a critic steps less often than that by itself.
_MOST_STEPS_ALONE = 10
_NUM_COMPARED = 2
_LEAST_STEPS_IN_PARTS, _MOST_STEPS_IN_PARTS = 4, 12
_MOST_SECONDS_IN_PARTS = 60.0


@dataclass
class _Iteration:
    """One iteration, from its beginning on."""

    watcher: LoopWatcher
    hazards: HazardLog
    begins: SourceLine | None
    host_state: HostState
    host_optimizers: list[HostOptimizer]
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    forms: list[tuple[Any, ...]] = field(default_factory=list)  # of its inputs


class WatchedLoop:
    """The iterations of one loop.

    Attributes:
        came_to: How far it has come.
        moved: Where a tensor was given other memory, by its id.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        target: str,
        is_theirs: bool,
        end: Callable[[CheckReport], NoReturn],
    ) -> None:
        """``is_theirs``: the script calls ``capture_in_place`` itself."""
        self.came_to = "stepped no optimizer"
        self.moved: dict[int, SourceLine | None] = {}
        self._target = target
        self._is_theirs = is_theirs
        self._end = end
        self._thread = threading.get_ident()
        self._models = models
        # As the script has them, by those that they wrap.
        self._optimizers = {inner_optimizer(each, ignoring): each for each in optimizers}
        self._recorded: dict[torch.optim.Optimizer, BakedAdapter] = {}  # as they are written
        self._hazards = HazardLog()
        self._early: list[Hazard] = []  # reads of the first iteration
        self._settings: Trained | None = None
        self._num = 0  # iterations that have begun
        self._begins_through = False  # with what another model has computed, to train that
        self._steps_as_written: bool | None = None  # the step that runs now
        self._iteration: _Iteration | None = None  # that runs now
        self._open = ExitStack()
        self._judged: list[_Iteration] = []
        self._advice: Advice | None = None
        self._parts: Parts | None = None
        self._num_in_parts = 0
        self._undo = ExitStack()
        self._follow_steps()

    def _follow_steps(self) -> None:
        for optimizer in self._optimizers:
            self._follow_steps_of(optimizer)

    def _follow_steps_of(self, optimizer: torch.optim.Optimizer) -> None:
        @wraps(optimizer.step)  # with the mark that schedulers look for
        def call(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            following.stop()  # adapters look there, too
            try:
                result = self._step(optimizer, args, kwargs)
            finally:
                following.start()
            self._on_stepped(optimizer)
            return result

        following = mock.patch.object(optimizer, "step", MethodType(call, optimizer))
        following.start()
        self._undo.callback(following.stop)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        adapter = self._recorded.get(optimizer)
        before, self._steps_as_written = self._steps_as_written, adapter is not None
        try:
            with nullcontext() if adapter is None or self._parts else adapter.stepping():
                return optimizer.step(*args, **kwargs)
        except CaptureError as error:  # what a graph could not hold of it; nobody trains here
            self._note_hazards([error.hazard])
            return None
        finally:
            self._steps_as_written = before

    def on_call(self, module: nn.Module, args: Any, kwargs: Any) -> AbstractContextManager[object]:
        """Begin an iteration with the call of a module, where it does; return what to run it in."""
        if self._iteration is not None:
            self._end_if_stepped(self._iteration)
        if self._parts is not None:
            return nullcontext()
        if self._iteration is not None:
            return self._iteration.watcher.around_call(module)
        if not (trains(module) and any(module is each for each in self._together().modules())):
            return nullcontext()
        if self._steps_as_written is None and running_optimizer() is not None:
            return nullcontext()  # of a step that was under way before the end is not seen
        # A call that trains another model is none of an iteration, unless all of them do.
        is_through = _trains_through(args, kwargs)
        if not self._num:
            self._begins_through = is_through
        if self._begins_through or not is_through:
            self._begin()
        return nullcontext()

    def _begin(self) -> None:
        self._num += 1
        together = self._together()
        if self._judged:
            self._note_changes(self._judged[-1])
        hazards = HazardLog()
        watcher = LoopWatcher(
            together,
            self._device(),
            hazards,
            for_cuda=self._target == "cuda",
            steps_as_written=lambda: self._steps_as_written,
        )
        self._iteration = _Iteration(
            watcher,
            hazards,
            user_source_line(),
            HostState(together, (), lambda: None),
            list(map(HostOptimizer, self._recorded)),
        )
        self._open.enter_context(as_written())  # a dispatch mode would not see into compiled code
        self._open.enter_context(watcher.watching())

    def _together(self) -> nn.Module:
        return self._models[0] if len(self._models) == 1 else one_module(self._models)

    def _device(self) -> torch.device:
        return next(iter(self._together().parameters())).device

    def _find_settings(self) -> None:
        """Note what is wrong with models and optimizers by themselves."""
        noting = Findings(self._hazards).noting
        with noting(HazardKind.CONFIG):  # what leaves nothing to go on with
            self._settings = prepare(
                self._together(), [*self._optimizers], CaptureOptions(), noting=noting
            )
            members = members_of(self._settings.adapted)
            self._recorded = {m.optimizer: m for m in members if type(m) is BakedAdapter}

    def _note_changes(self, judged: _Iteration) -> None:
        """Note what has changed since an iteration began, and a graph would not see."""
        model = self._together()
        moved = {
            repr(name): self.moved[id(tensor)]
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if id(tensor) in self.moved
        }
        for error in judged.host_state.changes(judged.watcher.has_touched):
            hazard = error.hazard
            source = next((moved[name] for name in moved if name in hazard.why), hazard.source)
            why = hazard.why.replace("the iteration", "the loop", 1)
            self._add(replace(hazard, why=why, source=source))
        for change in self._settings.adapted.changes() if self._settings is not None else ():
            if change.kind is ChangeKind.BAKED_VALUE:
                self._add(
                    Hazard(
                        HazardKind.BAKED_NUMBER,
                        f"{change.name} was {change.old} in the iteration before, and is "
                        f"{change.new} now; each number would need a graph of its own",
                        change.remedy,
                        op=change.name,
                    )
                )

    def _note_hazards(self, found: Iterable[Hazard]) -> None:
        """Note what an iteration has shown, unless another one has."""
        told = {(hazard.kind, hazard.source or hazard.why) for hazard in self._hazards}
        for hazard in found:
            if (hazard.kind, hazard.source or hazard.why) not in told:
                self._hazards.add(hazard)

    def _add(self, hazard: Hazard) -> None:
        """Note a hazard, unless its line has told of one: this may be what follows."""
        if hazard.source is None or all(hazard.source != known.source for known in self._hazards):
            self._note_hazards([hazard])

    def _on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        iteration = self._iteration
        if self._parts is not None:
            self._on_step_in_parts(self._parts, optimizer)
        elif (
            iteration is not None
            and optimizer in self._optimizers
            and threading.get_ident() == self._thread
        ):
            iteration.stepped.append(optimizer)
            self._end_if_stepped(iteration)

    def _end_if_stepped(self, iteration: _Iteration) -> None:
        """End it behind the last step; at the next call, if a hook has stepped in backward.

        Autograd runs hooks out of sight of the modes, which can be taken off no earlier.
        """
        if not iteration.stepped or is_in_backward():
            return
        if not any(_is_awaited(each, iteration) for each in self._optimizers):
            self._iteration = None
            self._open.close()
            self._on_end(iteration)

    def _on_end(self, iteration: _Iteration) -> None:
        self.came_to = "stepped its optimizer once"
        if self._num == 1:  # which shows what is trained in one
            self._optimizers = {each: self._optimizers[each] for each in iteration.stepped}
            self._models = _owners_of(self._models, iteration.stepped)
            self._find_settings()
            # What is made once is made there.
            self._early = [hazard for hazard in iteration.hazards if hazard.fix == LATER]
            return
        self._note_hazards(iteration.hazards)
        begins = iteration.begins
        self._note_hazards([h for h in self._early if not _is_before(h.source, begins)])
        watcher = iteration.watcher
        inputs = list(watcher.inputs.values())
        watcher.inputs.clear()
        for error in (each for known in iteration.host_optimizers for each in known.changes()):
            self._add(error.hazard)
        for name in watcher.added[:1]:
            self._add(_of_gradients(name))
        if self._settings is not None:
            self._settings.adapted.bake()
        iteration.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        self._judged.append(iteration)
        last = self._optimizers[iteration.stepped[-1]]
        self._advice = Advice(
            models=names_of(*self._models, fallback="model"),
            optimizers=names_of(*self._optimizers.values(), fallback="optimizer"),
            step=f"{names_of(last, fallback='optimizer')[0]}.step()",
            names=self._names_of_parts(),
            begins=begins,
            ends=user_source_line(),
            # Others are made in the iteration, or found by what makes up its code.
            inputs=[name for name in names_of(*inputs, fallback="") if name],
            launches=watcher.launches(),
            has_other_shapes=any(each.forms != iteration.forms for each in self._judged),
            is_theirs=self._is_theirs,
            integration=integration_of(),
            beside=list(watcher.beside),
        )
        if len(self._judged) == _NUM_COMPARED:
            self._note_differences(*self._judged)
            self._show_parts()

    def _note_differences(self, one: _Iteration, other: _Iteration) -> None:
        """Note numbers that are others in the next iteration, though nothing else is."""
        if one.forms != other.forms:
            return
        logs = [one.watcher.log, other.watcher.log]
        if one.watcher.has_read or other.watcher.has_read:
            for log in logs:
                log.entries = log.entries[: min(len(each.entries) for each in logs)]
        for found in logs[0].differences(logs[1]):
            self._add(found.hazard)

    def _names_of_parts(self) -> Mapping[str, str]:
        """Return what the script calls what a report of parts names by place."""
        found = {}
        for kind, values in (("model", self._models), ("optimizer", self._optimizers.values())):
            for place, value in enumerate(values):
                known = f"{kind} {place}"
                found[known] = names_of(value, fallback=known)[0]
        found["model"] = found["model 0"]
        return found

    def _show_parts(self) -> None:
        """Let the loop go on as ``capture_in_place`` would have it."""
        self._undo.close()
        self._parts = Parts(self._models, [*self._optimizers], keeps_all=True)
        self._undo.callback(self._parts.close)
        self._began_parts = time.monotonic()
        self._follow_steps()

    def _on_step_in_parts(self, parts: Parts, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not next(iter(self._optimizers)):
            return
        self._num_in_parts += 1
        is_settled = self._num_in_parts > _LEAST_STEPS_IN_PARTS and all(
            line.state != PartState.WARMUP.value for line in parts.report().parts
        )
        is_late = time.monotonic() - self._began_parts > _MOST_SECONDS_IN_PARTS
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            is_settled = is_late = False  # all ranks end with the same step
        if is_settled or is_late or self._num_in_parts >= _MOST_STEPS_IN_PARTS:
            self.finish()

    def finish(self) -> None:
        """End the script with what was seen; return if that is not enough."""
        if self._settings is None and not self._hazards:
            self._find_settings()
        if self._advice is not None or self._hazards:
            self._end(self._report())

    def _report(self) -> CheckReport:
        report = CheckReport((), str(self._device()), self._target)
        advice = self._advice
        if advice is None:
            return replace(report, hazards=tuple(self._hazards))
        later = LATER.replace("optimizer.step()", advice.step)
        parts = None if self._parts is None else self._parts.report()
        return replace(
            report,
            hazards=tuple(
                replace(hazard, fix=later) if hazard.fix == LATER else hazard
                for hazard in self._hazards
                if advice.integration is None or not advice.integration.holds(hazard.source)
            ),
            num_ops=sum(count for _, count in advice.launches),
            advice=advice.text(parts),
            parts=parts,
            launches=tuple(advice.places()),
        )

    def close(self) -> None:
        self._undo.close()
        self._iteration = None
        self._open.close()


def _is_awaited(optimizer: torch.optim.Optimizer, iteration: _Iteration) -> bool:
    """Tell whether another optimizer has still to step in the iteration that runs."""
    params, stepped = _params_of(optimizer), iteration.stepped
    is_left_alone = stepped.count(stepped[-1]) >= _MOST_STEPS_ALONE
    return (
        not is_left_alone
        and all(params.keys().isdisjoint(_params_of(each)) for each in stepped)
        and any(map(iteration.watcher.has_touched, params.values()))
    )


def _of_gradients(name: str) -> Hazard:
    return Hazard(
        HazardKind.STATE,
        f"gradients were not zeroed since the optimizer's last step, that of {name!r} for one; a "
        "captured iteration begins without any",
        "optimizer.zero_grad() in each iteration; graphfsdp.capture(microbatches=n) accumulates "
        "the gradients of n batches within one",
    )


def _is_before(source: SourceLine | None, begins: SourceLine | None) -> bool:
    """Tell whether a line is passed before the loop, as by a first look at the model."""
    if source is None or begins is None or source.line >= begins.line:
        return False
    return (source.file, source.function) == (begins.file, begins.function)


def trains(module: nn.Module) -> bool:
    """Tell whether a call of a module now is one that trains it."""
    return (
        torch.is_grad_enabled()
        and module.training
        and any(param.requires_grad for param in module.parameters())
    )


def _trains_through(args: Any, kwargs: Any) -> bool:
    """Tell whether a call is given what another model has computed, to train that."""
    leaves = tree_leaves((args, kwargs))
    return any(isinstance(t, Tensor) and t.requires_grad and not t.is_leaf for t in leaves)


def trained_with(module: nn.Module) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return what may be trained in one iteration with a module: all that optimizers hold.

    Nothing if no optimizer has its parameters.
    """
    gc.collect()  # optimizers that somebody has replaced
    alive = [(each, type(each)) for each in gc.get_objects()]
    optimizers = [each for each, kind in alive if issubclass(kind, torch.optim.Optimizer)]
    inner = {id(getattr(each, "optimizer", None)) for each in optimizers}  # of wrappers
    optimizers = [o for o in optimizers if id(o) not in inner and hasattr(o, "param_groups")]
    held = set(map(id, module.parameters()))
    if all(not _params_of(each).keys() & held for each in optimizers):
        return [], []
    modules = [each for each, kind in alive if issubclass(kind, nn.Module)]
    parts = {id(child) for each in modules for child in nn.Module.children(each)}
    roots = [each for each in modules if id(each) not in parts]
    # The one that is called comes first, and the whole before another module made of its parts.
    roots.sort(key=lambda each: -sum(1 for _ in nn.Module.modules(each)))
    roots.sort(key=lambda each: all(part is not module for part in nn.Module.modules(each)))
    return _owners_of(roots, optimizers), optimizers


def _owners_of(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> list[nn.Module]:
    """Return the models that have the optimizers' parameters."""
    left = {key for each in optimizers for key in _params_of(each)}
    found = []
    for model in models:
        held = set(map(id, model.parameters()))
        if held & left:
            found.append(model)
            left -= held
    return found


def _params_of(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return the parameters that an optimizer holds, by id."""
    return {id(param): param for group in optimizer.param_groups for param in group["params"]}
