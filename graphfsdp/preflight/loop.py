"""Follows the loop of a script as ``capture_in_place`` does, and judges its second iteration.

What a loop may do is said in one place, ``graphfsdp.in_place``: the first iteration runs as
written, the second one is put off. Where that would be captured, it is checked. What the loop
reads is noted, and it gets the value; any other refusal ends the script.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import nn

from graphfsdp import in_place
from graphfsdp._capture.rules.refusals import running_optimizer
from graphfsdp._capture.trace.source import frames, is_users_file, user_source_line
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog, SourceLine
from graphfsdp.errors import CaptureError, GraphFSDPError
from graphfsdp.in_place.calls import LAST, LATER, MOST_NEW, PLAIN, Call, Own, Point, name_of, same
from graphfsdp.in_place.gradients import of_gradients
from graphfsdp.in_place.loop import InPlace
from graphfsdp.in_place.region import Region
from graphfsdp.preflight.check import check_call
from graphfsdp.preflight.rehearsal import hazard_of
from graphfsdp.preflight.report import CheckReport

Stop = Callable[[CheckReport], NoReturn]
_Models = Sequence[nn.Module]
_Optimizers = Sequence[torch.optim.Optimizer]
# From here on others have nothing to do with it; a critic steps less often than that by itself.
_MOST_STEPS_ALONE = 10
_STEPPED = "stepped its optimizer once"


class ScriptLoops:
    """Finds what a script trains, when it calls a model that an optimizer is for."""

    def __init__(self, target: str, stop: Stop) -> None:
        self.came_to = "trained no model with an optimizer"
        self.target = target
        self.is_theirs = False  # the script captures by itself
        self._stop = stop
        self._loop: _Loop | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        call = nn.Module.__call__

        def start_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._loop is None and not self.is_theirs and _trains(module):
                models, optimizers = _trained_with(module)
                if optimizers:
                    with self.ending():
                        self._follow(models, optimizers, {}).install()
            return call(module, *args, **kwargs)

        def start_theirs(*given: Any) -> _Loop:
            self.leave()
            return self._follow(*given)

        def start_whole(models: Any, optimizers: Any, *, keeps_all: bool) -> _Loop:
            loop = start_theirs(models, optimizers, {})
            loop.install()
            return loop

        try:
            with (
                mock.patch.object(nn.Module, "__call__", start_and_call),
                mock.patch.object(in_place, "InPlace", start_theirs),
                mock.patch.object(in_place, "Parts", start_whole),
            ):
                yield
        except GraphFSDPError as error:
            if self._loop is None:
                raise
            self.stop([hazard_of(error)])
        finally:
            self._end()

    def leave(self) -> None:
        """Look no longer for loops: the script captures by itself."""
        self.is_theirs = True
        self._end()

    def start_again(self, optimizers: _Optimizers) -> None:
        """Follow some of the optimizers alone, from their second iteration on."""
        before = self._loop
        assert before is not None
        self._end()
        self._follow(_owners(before.models, optimizers), optimizers, {}, before).install()
        self.came_to = _STEPPED

    def stop(self, hazards: Sequence[Hazard], report: CheckReport | None = None) -> NoReturn:
        loop = self._loop
        report = report or CheckReport((), "?" if loop is None else loop.device, self.target)
        if loop is not None:
            advice = "" if self.is_theirs else loop.advice()
            report = replace(report, advice=advice)
            hazards = loop.hazards_with(hazards)
        self._stop(replace(report, hazards=tuple(hazards)))

    def _follow(self, *given: Any) -> "_Loop":
        with self.ending():
            self._loop = _Loop(self, *given)
            self.came_to = "stepped no optimizer"
            return self._loop

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End the script with what would end a captured loop."""
        try:
            yield
        except GraphFSDPError as error:
            self.stop([hazard_of(error)])

    def _end(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


class _Region(Region):
    """Goes on where the loop reads a value, and gives it that."""

    on_hazard: Callable[[Hazard], None]
    _has_read = False

    def do(self, function: Callable[..., Any], *details: Any, **options: Any) -> Any:
        point, self._has_read = self.point, False
        result = super().do(function, *details, **options)
        if self._has_read:  # no call that a graph could hold
            self.point = point
            point.following.pop()
        return result

    def on_read(self, call: Call, value: Any) -> Any:
        if not self._has_read:
            self._has_read = True
            hazard = self.refusal_of_read(call).hazard
            self.on_hazard(replace(hazard, op=name_of(call.function)))
        return value


class _Loop(InPlace):
    """A loop whose second iteration is checked where it would be captured."""

    def __init__(
        self,
        script: ScriptLoops,
        models: _Models,
        optimizers: _Optimizers,
        options: Mapping[str, Any],
        before: "_Loop | None" = None,
    ) -> None:
        """``before``: what has followed the first iteration."""
        super().__init__(models, optimizers, options)
        self.models = models
        self.device = str(self._device)
        self._script = script
        if before is not None:
            self._gradients.leave()
            self._adapted.bake()
        self._is_second = before is not None
        self._hazards = HazardLog()
        self._earlier = HazardLog() if before is None else before._hazards
        self._stepped: list[torch.optim.Optimizer] = []
        self._begins: SourceLine | None = None
        self._ends: SourceLine | None = None
        self._note = ""
        # Then it is a closure's, and what it steps with is not seen before the next call.
        self._is_within_step = running_optimizer() is not None

    def hazards_with(self, others: Iterable[Hazard]) -> list[Hazard]:
        """Return what the loop does and these, each once."""
        found = [*self._hazards, *others]
        told = {(hazard.kind, hazard.source) for hazard in found}
        found += [
            hazard
            for hazard in self._earlier
            if (hazard.kind, hazard.source) not in told and not self._is_before(hazard.source)
        ]
        if len(self._optimizers) > 1:
            last = _names("the last optimizer", *self._in_order()[-1:])
            later = LATER.replace("optimizer", last)
            found = [
                replace(hazard, fix=hazard.fix.replace(LATER, later).replace(LAST, later))
                for hazard in found
            ]
        return found

    def advice(self) -> str:
        """Return the lines to add, by the names that the script has where it steps."""
        where = f" ({_place(self._begins)} to {_place(self._ends)})" if self._ends else ""
        return (
            f"before the loop:  graphfsdp.capture_in_place({_names('model', *self.models)}, "
            f"{_names('optimizer', *self._in_order())}, whole=True)\n"
            f"the loop stays:   from the model's call to the optimizer's step{where} it is one "
            f"graph{self._note}"
        )

    def _in_order(self) -> list[torch.optim.Optimizer]:
        return list(dict.fromkeys([*self._stepped, *self._optimizers]))

    def _is_before(self, source: SourceLine | None) -> bool:
        """Tell whether a line is passed before the loop, as by a first look at the model."""
        begins = self._begins
        if source is None or begins is None or source.line >= begins.line:
            return False
        return (source.file, source.function) == (begins.file, begins.function)

    def _new_region(self) -> Region:
        self._begins = user_source_line()
        region = _Region(self._root, self._own, self._device.type, self._attributes, self._units)
        region.on_hazard = self._hazards.add
        region.is_known = not len(self._earlier)  # what it has read is not there before the step
        return region

    @contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        with self._script.ending(), super()._left_if_it_fails():  # the script might catch it
            yield

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._is_within_step:
            self._is_within_step = False
            self._leave()
            self._root, self._hazards = Point(), HazardLog()
        return super()._on_step(optimizer, args, kwargs)

    def _end_with(self, optimizer: Any, step: Callable[[], object]) -> None:
        region = self._region
        others: list[torch.optim.Optimizer] = []
        if region is not None:
            self._stepped.append(optimizer)
            if not self._is_second and not self._script.is_theirs:
                others = self._others(region, optimizer)
        super()._end_with(optimizer, step)
        if others:
            left = [each for each in self._optimizers if all(each is not o for o in others)]
            self._script.start_again(left)

    def _others(
        self, region: Region, optimizer: torch.optim.Optimizer
    ) -> list[torch.optim.Optimizer]:
        """Return optimizers that have no part in an iteration in which this one has stepped."""
        used = set()
        for call in region.point.calls():
            owner = getattr(call.function, "__self__", None)
            used |= {id(leaf.tensor) for leaf in call.leaves if isinstance(leaf, Own)}
            used |= set(map(id, owner.parameters())) if isinstance(owner, nn.Module) else set()
        is_alone = self._stepped.count(optimizer) == _MOST_STEPS_ALONE
        return [
            other
            for other in self._optimizers
            if all(other is not each for each in self._stepped)
            and (is_alone or not _params(other) & used or _params(other) & _params(optimizer))
        ]

    def _running_on(self, region: Region) -> None:
        name = super()._running_on(region)
        if name is not None and self._is_second:
            self._hazards.add(of_gradients(name).hazard)

    def _finish(self, region: Region) -> None:
        for check in (partial(super()._finish, region), region.check_undrawn):
            try:
                check()
            except CaptureError as error:
                self._hazards.add(error.hazard)
        if not self._is_second:
            self._is_second, self._script.came_to = True, _STEPPED
            self._earlier, self._hazards = self._hazards, self._earlier
            self._adapted.bake()
            return
        self._ends = user_source_line()
        if region.new_at is not None:
            self._note_other(*region.new_at)
        for change in self._adapted.changes():
            if change.kind is ChangeKind.BAKED_VALUE:
                self._note_moved(change)
        index = self._program(region)
        report = check_call(
            *self._arguments(),
            (index, *region.given),
            {},
            iteration=self._iterate,
            target=self._script.target,
        )
        self._script.stop([h for h in report.hazards if not self._is_harmless(h)], report)

    def _is_harmless(self, hazard: Hazard) -> bool:
        if hazard.kind is HazardKind.GRADIENT:  # the loop leaves the parameter out, too
            return hazard.op is None
        # Of an lr that is baked in: whether it moves is seen here.
        return hazard.op is not None and hazard.op.endswith("['lr']")

    def _note_moved(self, change: Change) -> None:
        hazard = Hazard(
            HazardKind.BAKED_NUMBER,
            f"{change.name} was {change.old} in the iteration before, and is {change.new} now; "
            "each number would get a graph of its own, until that is refused as useless",
            change.remedy,
            op=change.name,
        )
        self._hazards.add(hazard)

    def _replay(self, region: Region) -> None:
        """Do nothing: the check takes its place."""

    def _note_other(self, call: Call, known: Call | None) -> None:
        """Note why the second iteration has another call than the first."""
        if known is None or call.function != known.function:
            return
        pairs = zip(known.leaves, call.leaves, strict=False)
        moved = [pair for pair in pairs if isinstance(pair[0], PLAIN) and not same(*pair)]
        if call.forms != known.forms:  # with which come other numbers
            self._note = (
                f"\nother shapes:     {_place(call.source)} has others than the iteration before: "
                f"a graph for each,\n{' ' * 18}and {MOST_NEW + 1} new ones in a row are refused"
            )
        elif moved:
            before, now = moved[0]
            hazard = Hazard(
                HazardKind.BAKED_NUMBER,
                f"the call gets {now!r}, and {before!r} in the iteration before; each number would "
                f"get a graph of its own, and {MOST_NEW + 1} new ones in a row are refused",
                "give numbers that change as 0-D tensors on the model's device",
                op=name_of(call.function),
                source=call.source,
            )
            self._hazards.add(hazard)


def _trains(module: nn.Module) -> bool:
    return (
        torch.is_grad_enabled()
        and module.training
        and any(param.requires_grad for param in module.parameters())
    )


def _trained_with(module: nn.Module) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return what may be trained in one iteration with a module: all that optimizers hold.

    Nothing if no optimizer has its parameters.
    """
    gc.collect()  # optimizers that somebody has replaced
    alive = [(each, type(each)) for each in gc.get_objects()]
    optimizers = [each for each, kind in alive if issubclass(kind, torch.optim.Optimizer)]
    inner = {id(getattr(each, "optimizer", None)) for each in optimizers}  # of wrappers
    optimizers = [o for o in optimizers if id(o) not in inner and hasattr(o, "param_groups")]
    held = set(map(id, module.parameters()))
    if all(not _params(each) & held for each in optimizers):
        return [], []
    modules = [each for each, kind in alive if issubclass(kind, nn.Module)]
    parts = {id(child) for each in modules for child in each.children()}
    roots = [each for each in modules if id(each) not in parts]
    # The one that is called comes first, and the whole before another module made of its parts.
    roots.sort(key=lambda each: -sum(1 for _ in each.modules()))
    roots.sort(key=lambda each: all(part is not module for part in each.modules()))
    return _owners(roots, optimizers), optimizers


def _owners(models: _Models, optimizers: _Optimizers) -> list[nn.Module]:
    """Return the models that have the optimizers' parameters."""
    left = {key for each in optimizers for key in _params(each)}
    found = []
    for model in models:
        held = set(map(id, model.parameters()))
        if held & left:
            found.append(model)
            left -= held
    return found


def _params(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _place(source: SourceLine | None) -> str:
    return "?" if source is None else f"{source.file.rpartition('/')[2]}:{source.line}"


def _names(fallback: str, *values: object) -> str:
    """Return what the script calls these where it steps."""
    frame = next((f for f in frames() if is_users_file(f.f_code.co_filename)), None)
    scope: dict[str, object] = {}
    if frame is not None:
        owner = getattr(frame.f_locals.get("self"), "__dict__", {})
        of_owner = {f"self.{name}": value for name, value in owner.items()}
        scope = {**of_owner, **frame.f_globals, **frame.f_locals}
    wanted = set(map(id, values))
    for name, value in scope.items():
        if isinstance(value, list | tuple) and set(map(id, value)) == wanted:
            return name
    known = {id(value): name for name, value in scope.items()}
    names = list(dict.fromkeys(known.get(id(value), fallback) for value in values))
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
