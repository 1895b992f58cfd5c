"""Takes what lies between two steps of an optimizer as the iteration of an unchanged script."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree

from graphfsdp._capture.rules.refusals import Refusal
from graphfsdp._capture.trace.source import frames, is_users_file
from graphfsdp.base.hazards import Hazard, HazardKind, HazardLog, SourceLine
from graphfsdp.base.op_tensors import OpCall, as_written, flat_tensors, storage_key
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, split_remedy
from graphfsdp.in_place.calls import LATER
from graphfsdp.optim.adapters.backends import NativeAdapter, adapt
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.preconditions import inner_optimizer
from graphfsdp.preflight.report import CheckReport
from graphfsdp.preflight.watcher import PreflightWatcher

Stop = Callable[[CheckReport], None]


class _Watcher(PreflightWatcher):
    """Watches what ``capture_in_place`` takes of a running program.

    That is what touches models, weights or what came of them; ``num_inside`` counts the calls of
    such that are under way. ``is_paused`` while nothing is to be seen.
    """

    is_paused = False
    num_inside = 0

    def take(self, models: Iterable[nn.Module]) -> None:
        """Take these as models from now on."""
        self._weights = {
            storage_key(tensor)
            for model in models
            for tensor in (*model.parameters(), *model.buffers())
        }

    def dispatch(self, call: OpCall) -> Any:
        return super().dispatch(call) if self._is_judged(call.tensors) else call.run()

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not self._is_judged(flat_tensors([args, kwargs])):
            return function(*args, **kwargs)
        self.num_inside += 1
        try:
            return super().on_function(function, args, kwargs)
        finally:
            self.num_inside -= 1

    def on_host_call(self, name: str, refusal: Refusal) -> None:
        is_loops = refusal.kind is HazardKind.BAKED_NUMBER and not self.num_inside
        if not self.is_paused and not is_loops:
            super().on_host_call(name, refusal)

    def refuse_at(
        self, op: str, refusal: Refusal, module_path: str | None, source: SourceLine | None
    ) -> None:
        if refusal.kind is HazardKind.HOST_READ and self.num_inside == 1:  # a line of the loop
            refusal = replace(refusal, remedy=LATER)
        super().refuse_at(op, refusal, module_path, source)

    def _is_judged(self, tensors: Sequence[Tensor]) -> bool:
        return not self.is_paused and (self.num_inside > 0 or any(map(self._touches, tensors)))

    def _touches(self, tensor: Tensor) -> bool:
        key = storage_key(tensor)
        info = self.storages.get(key)
        return key in self._weights or (info is not None and not info.external)


class BetweenSteps:
    """Follows a script until an optimizer steps for the second time, and ends it there.

    The first iteration makes what is made once, and is looked at for numbers only. The second one
    is judged, from the first call of the model to the end of the step; what the loop does before
    (the next batch, logging, the schedule) stays outside of a captured step.
    """

    def __init__(self, target: str, is_answered: Callable[[], bool], stop: Stop) -> None:
        """``is_answered``: the script calls ``graphfsdp.capture`` itself; then do nothing."""
        self._for_cuda = target == "cuda"
        self._target = target
        self._is_answered = is_answered
        self._stop = stop
        self._model: nn.Module | None = None
        self._models: list[nn.Module] = []  # that, and others that the loop calls by themselves
        self._first: torch.optim.Optimizer | None = None
        self._others: list[torch.optim.Optimizer] = []
        self._num_steps = 0
        self._depth = 0
        self._watchers: list[_Watcher] = []
        self._shapes: list[list[Any]] = []  # of what the model was called with, by iteration
        self._hazards = HazardLog()
        self._open = ExitStack()
        self._stance = ExitStack()
        self._is_between = False
        self._begins = self._ends = ""  # lines of the second iteration

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @contextmanager
    def following(self) -> Iterator[None]:
        handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            with warnings.catch_warnings():
                # Of ours, which fire once more for the wrapper: that is meant.
                warnings.filterwarnings("ignore", message=".*when there are global hooks on")
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.close()
            self._stance.close()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._is_answered():
            return
        is_first = self._depth == 0 and (self._model is None or self._is_between)
        if is_first and _is_trainable(module):
            self._model = module if self._model is None else self._model
            self._go_on()
        if not self._depth and _is_trainable(module):
            parts = (part for model in self._models for part in model.modules())
            if all(module is not part for part in parts):
                self._models.append(module)
                if self._watchers:
                    self._watchers[-1].take(self._models)
        if self._watchers and self._is_known(module):
            self._watchers[-1].num_inside += 1
        if module is not self._model or not (self._depth or _is_trainable(module)):
            return
        self._depth += 1
        if self._depth > 1:
            return
        if not self._watchers:
            self._stance.enter_context(as_written())
        if len(self._watchers) == self._num_steps < 2:
            self._begin(module)
            self._watchers[-1].num_inside = 1
        if self._shapes:
            batch = (args, _keywords_of_call())
            self._watchers[-1].note_batch(batch)
            self._shapes[-1].append(pytree.tree_map(_shape, batch))

    def _is_known(self, module: nn.Module) -> bool:
        return any(module is model for model in self._models)

    def _go_on(self) -> None:
        """Look again; what the loop does between a step and the next forward stays outside."""
        self._is_between = False
        if self._watchers:
            self._watchers[-1].is_paused = False

    def _begin(self, model: nn.Module) -> None:
        device = next(model.parameters()).device
        watcher = _Watcher(model, device, self._hazards, for_cuda=self._for_cuda)
        watcher.take(self._models)
        self._begins = _user_place()
        self._watchers.append(watcher)
        self._shapes.append([])
        # Entered from a hook: the modes stay until the step is over.
        self._open.enter_context(watcher.watching())
        if self._num_steps == 0:
            self._open.enter_context(watcher.quiet())

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._watchers and self._is_known(module):
            self._watchers[-1].num_inside -= 1
        if module is self._model and self._depth:
            self._depth -= 1

    def _before_step(self, optimizer: torch.optim.Optimizer, *details: Any) -> None:
        if self._watchers:
            self._watchers[-1].is_paused = _is_made_capturable(optimizer)
            self._watchers[-1].num_inside = 1

    def _after_step(self, optimizer: torch.optim.Optimizer, *details: Any) -> None:
        if self._is_answered():
            return
        self._is_between = True
        if self._watchers:
            self._watchers[-1].is_paused = True
            self._watchers[-1].num_inside = 0
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            if all(optimizer is not other for other in self._others):
                self._others.append(optimizer)
            return
        self._num_steps += 1
        self._open.close()
        if self._num_steps == 2 and len(self._watchers) == 2:
            self._ends = _user_place()
            self._stop(self._report())

    def _report(self) -> CheckReport:
        assert self._model is not None
        assert self._first is not None
        first, second = self._watchers
        before, now = self._shapes
        for optimizer in (self._first, *self._others):
            self._note_optimizer(optimizer)
        # Other shapes get a graph of their own, and with them come other numbers.
        if not self._others and (before == now or len(before) != len(now)):
            self._note_numbers(first, second)
        return CheckReport(
            tuple(self._hazards),
            str(next(self._model.parameters()).device),
            self._target,
            second.num_ops,
            advice=self._advice(),
        )

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        assert self._model is not None
        named = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        try:
            adapted = adapt(inner_optimizer(optimizer))
            policy = MixedPrecisionPolicy(use_decoupled_grad=adapted.use_decoupled_grad)
            adapted.check(named, policy, Scope.FULL_ITERATION)
        except ConfigError as error:
            self._hazards.add(Hazard(HazardKind.OPTIMIZER, *split_remedy(str(error))))

    def _note_numbers(self, first: _Watcher, second: _Watcher) -> None:
        sites = second.sites.sites()
        known = {hazard.source for hazard in self._hazards}
        for each in first.constants.differences(second.constants):
            # Another path, or other memory: the first iteration has made what is made once, and
            # each has a batch of its own.
            if each.refusal.kind is HazardKind.BAKED_NUMBER and each.site is not None:
                site = sites[each.site]
                if site.source is not None and site.source in known:
                    continue  # where the number came from is told already
                second.refuse_at(each.op, each.refusal, site.module, site.source)

    def _advice(self) -> str:
        models = _names("model", *self._models)
        optimizers = _names("optimizer", self._first, *self._others)
        where = "" if self._others else f" ({self._begins} to {self._ends})"
        return (
            f"before the loop:  graphfsdp.capture_in_place({models}, {optimizers})\n"
            f"the loop stays:   from the model's call to the optimizer's step{where} it is one "
            "graph"
        )


def _is_trainable(module: nn.Module) -> bool:
    return (
        torch.is_grad_enabled()
        and module.training
        and any(param.requires_grad for param in module.parameters())
    )


def _keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the module that is called; hooks for all are not told."""
    for frame in frames():
        if frame.f_code.co_filename.endswith("nn/modules/module.py"):
            found = frame.f_locals.get("kwargs")
            return dict(found) if isinstance(found, dict) else {}
    return {}


def _is_made_capturable(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the steps need no look: a capture makes them what they have to be."""
    try:
        adapted = adapt(optimizer)
    except ConfigError:
        return True  # refused as a whole
    return isinstance(adapted, NativeAdapter) or (
        isinstance(adapted, BakedAdapter) and not adapted.bakes_lr
    )


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None


def _user_frame() -> FrameType | None:
    return next((f for f in frames() if is_users_file(f.f_code.co_filename)), None)


def _user_place() -> str:
    frame = _user_frame()
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _names(fallback: str, *values: object) -> str:
    """Return what the script calls these where it steps; of a module's parts, the module."""
    frame = _user_frame()
    known: dict[int, str] = {}
    if frame is not None:
        scope = {**frame.f_globals, **frame.f_locals}
        for name, value in scope.items():
            known.setdefault(id(value), name)
        owner = frame.f_locals.get("self")
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            known.setdefault(id(value), f"self.{name}")
        for name, value in scope.items():
            for part in value.modules() if isinstance(value, nn.Module) else ():
                known.setdefault(id(part), name)
    names = list(dict.fromkeys(known.get(id(value), fallback) for value in values))
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
