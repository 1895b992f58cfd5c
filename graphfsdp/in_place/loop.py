"""The loop around the iterations, which goes on as it is written."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial, wraps
from types import FrameType, MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)

from graphfsdp._capture.choose_backend import make_backend
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.report.report import CaptureReport
from graphfsdp._capture.step import CapturedStep
from graphfsdp._capture.trace.source import user_source_line
from graphfsdp._capture.undo.interrupts import (
    SIGNALS,
    DeferredInterrupts,
    InterruptibleIteration,
    handled_signals,
    run_users,
)
from graphfsdp.api import capture
from graphfsdp.base.hazards import SourceLine
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.sharded import put_back, units_of
from graphfsdp.base.torch_internals import COMPILED_CALL
from graphfsdp.errors import CaptureError, ConfigError, PhaseError
from graphfsdp.in_place.calls import (
    MOST_NEW,
    Own,
    Point,
    Program,
    calls_first,
    refusal,
    trains_through,
)
from graphfsdp.in_place.forms import OF_FORM, OF_PLACE, copied
from graphfsdp.in_place.gradients import GradientsLeft, of_gradients, params_of
from graphfsdp.in_place.methods import (
    forward_methods,
    grouped_where_they_will_be,
    handle_for,
    methods_of_shards,
    refusing_other_optimizers,
)
from graphfsdp.in_place.region import Region
from graphfsdp.optim.adapters.backends import JointOptimizer, adapt
from graphfsdp.preconditions import (
    adopt_sharded_parameters,
    inner_optimizer,
    one_module,
    only_device,
    refuse_foreign_optimizer,
    trainable_of_all,
)

_GRADIENT: Any = Tensor.grad
_GRADIENT_OF, _SET_GRADIENT = _GRADIENT.__get__, _GRADIENT.__set__
# These ask for gradients one by one, also where a wrapper of an optimizer has inherited it.
_ZERO_GRADS = frozenset(
    inspect.unwrap(kind.zero_grad).__code__ for kind in (nn.Module, torch.optim.Optimizer)
)
_CLIP = nn.utils.clip_grad_norm_
_END_AUTOCAST = torch.clear_autocast_cache


def _whole(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have signals wait until a call from the loop is over, as in a call of a step."""

    @wraps(method)
    def run(loop: "InPlace", *args: Any) -> Any:
        if loop._is_running:
            return method(loop, *args)
        with DeferredInterrupts(loop._signals):
            return method(loop, *args)

    return run


class _Mode(TorchFunctionMode):
    def __init__(self, loop: "InPlace") -> None:
        super().__init__()
        self._loop = loop

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._loop._on_function(func, args, kwargs or {})


def _is_within_another() -> bool:
    return any(isinstance(mode, _Mode) for mode in _get_current_function_mode_stack())


def _end_abandoned() -> None:
    """End iterations that somebody has left, as by an error in a cell of a notebook."""
    while isinstance(mode := _get_current_function_mode(), _Mode):
        with suppress(Exception):  # told already, when the loop was left
            mode._loop._give_up()
        mode._loop._leave()


class _ModuleCall:
    """Asked in place of a module's own call, or of a method that counts as one."""

    def __init__(
        self, loop: "InPlace", module: nn.Module, method: Callable[..., Any] | None = None
    ) -> None:
        self._loop = loop
        self._module = module
        self._method = None
        if method is not None:  # a method, so that errors name the module
            self._method = MethodType(lambda _, *args, **kwargs: method(*args, **kwargs), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._loop._on_module(self._module, self._method, args, kwargs)


class InPlace:
    """A loop whose iterations are captured where they stand; ``graphfsdp.capture_in_place``."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        options: Mapping[str, Any],
    ) -> None:
        self._models = models
        self._units = list(dict.fromkeys(u for model in models for u in units_of(model)))
        put_back(self._units)
        self._optimizers = optimizers
        self._options = {"on_change": "recapture", **options}
        inner = [inner_optimizer(optimizer) for optimizer in optimizers]
        together = one_module(models)
        for each in inner:
            adopt_sharded_parameters(together, each)
        self._device = only_device(together, trainable_of_all(together, inner))
        make_backend("auto", self._device)  # which refuses other devices
        if len(inner) == 1:
            refuse_foreign_optimizer(together, inner[0])
        self._adapted = JointOptimizer([adapt(optimizer) for optimizer in inner])
        self._step: CapturedStep | None = None
        self._programs: list[Program] = []
        self._root = Point()
        held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        params = {id(p): p for p in (*held, *(p for model in models for p in model.parameters()))}
        self._own = params | {id(b): b for model in models for b in model.buffers()}
        self._gradients = GradientsLeft(params, held)
        self._attributes = [vars(module) for model in models for module in model.modules()]
        self._open = ExitStack()  # while a region is
        self._mode = _Mode(self)
        self._region: Region | None = None
        self._is_running = False
        self._is_on = False  # the mode
        self._handled: BaseException | None = None  # around the region
        self._zeroing_frame: FrameType | None = None
        self._num_new = 0  # iterations in a row that were like none before
        self._passed_by: SourceLine | None = None  # where another model was trained through ours
        self._zeroing = {id(optimizer): optimizer.zero_grad for optimizer in optimizers}
        self._steps = {id(optimizer): optimizer.step for optimizer in optimizers}
        # These look the method up in the iteration, where it is the one of an adapter.
        self._step_calls = {
            id(optimizer): partial(type(self)._step_of, optimizer) for optimizer in optimizers
        }
        self._undo = ExitStack()
        self._signals: Sequence[int] = SIGNALS  # fewer while a region is, to be asked for less

    @property
    def phase(self) -> Phase:
        """Where the captured iteration is: warming up, replaying, closed."""
        return Phase.WARMUP if self._step is None else self._step.phase

    def report(self, **options: Any) -> CaptureReport:
        """Return ``CapturedStep.report`` of the captured iteration."""
        if self._step is None:
            raise PhaseError(
                "nothing is captured yet: the optimizer has stepped fewer than two times"
            )
        return self._step.report(**options)

    @_whole
    def close(self) -> None:
        """Give graphs back, and let the loop run as written; idempotent.

        What was put off, and no step has come for, runs as written.
        """
        region = self._region
        self._leave()
        if region is not None and region.is_known:
            with suppress(CaptureError) if sys.exception() else nullcontext():
                region.catch_up(self._real)
        self._undo.close()
        if self._step is not None:
            self._step.close()

    @_whole
    def install(self) -> None:
        """Take the place of the models' calls and of the optimizers' steps."""
        _end_abandoned()
        for model in self._models:
            for module in model.modules():
                if vars(module).get(COMPILED_CALL) is not None:
                    raise ConfigError(
                        "the model is compiled, or captured in place already. Remedy: capture the "
                        "uncompiled model, once"
                    )
                vars(module)[COMPILED_CALL] = _ModuleCall(self, module)
                self._undo.callback(vars(module).pop, COMPILED_CALL, None)
                for name, method in forward_methods(module).items():
                    vars(module)[name] = _ModuleCall(self, module, method)
                    self._undo.callback(vars(module).__setitem__, name, method)
        # Once: each new hook makes guards look closely (see Note [Hook numbers]).
        is_going_on = lambda: self._region is not None and not self._is_running  # noqa: E731
        others = refusing_other_optimizers(self._steps, self._own, is_going_on)
        self._undo.enter_context(others)
        for optimizer in self._optimizers:
            self._replace(optimizer, "zero_grad", self._on_zero_grad)
            self._replace(optimizer, "step", self._on_step)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        before = vars(owner).get(name)

        @wraps(getattr(owner, name))  # with the mark that schedulers look for
        def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
            return function(owner, args, kwargs)

        vars(owner)[name] = MethodType(call, owner)  # which schedulers wrap

        def restore() -> None:
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before

        self._undo.callback(restore)

    def _on_module(
        self, module: nn.Module, method: Callable[..., Any] | None, args: Any, kwargs: Any
    ) -> Any:
        call = module._call_impl if method is None else method
        trains = module.training and torch.is_grad_enabled()
        if self._is_running or not (trains or self._is_on):
            return run_users(call, *args, **kwargs)
        if method is None:
            call = self._as_written(module)._call_impl
        return self._on_models_call(module, call, args, kwargs)

    @_whole
    def _on_models_call(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        region = self._current()
        if region is not None and not module.training and region.is_changed():
            self._evaluate_within(region)
            region = None
        if region is None:
            self._leave()
            if not _is_within_another() and trains_through(args, kwargs):
                self._passed_by = user_source_line()
                with self._running(), InterruptibleIteration(asks=False):
                    return run_users(call, *args, **kwargs)
            if not (torch.is_grad_enabled() and module.training):
                with InterruptibleIteration(asks=False):
                    return run_users(call, *args, **kwargs)
            region = self._begin()
        first = next(module.parameters(), None)
        is_whole = any(unit.pinned for unit in self._units)  # unshard() in between
        if first is not None and not region.owns(first) and not is_whole:
            self._leave()
            raise refusal(
                f"{type(module).__name__} has other parameters than when capture_in_place got it: "
                "load_state_dict(assign=True) or the loop has replaced them, or "
                "torch.func.functional_call does for a moment",
                "load_state_dict without assign, which writes into those that are there; after a "
                "replacement close() and capture_in_place again, with an optimizer that has the "
                "new ones; for functional_call graphfsdp.capture with iteration=",
            )
        return self._do(call, args, kwargs)

    def _as_written(self, module: nn.Module) -> nn.Module:
        """Return what a wrapper of ``torch.compile`` calls, for a recording on a CPU."""
        inner = vars(module)["_modules"].get("_orig_mod")
        return module if inner is None or self._device.type != "cpu" else inner

    def _begin(self) -> Region:
        if _is_within_another():
            raise ConfigError(
                "the iteration of one loop begins within that of another one, and each of them "
                "was captured in place. Remedy: capture_in_place(models, optimizers) once, with "
                "all of them"
            )
        self._gradients.begin()
        put_back(self._units)
        self._region = self._new_region()
        self._handled = sys.exception()
        self._signals = handled_signals()
        self._open.enter_context(as_written())  # compiled functions of the loop
        self._open.callback(setattr, nn.utils, "clip_grad_norm_", _CLIP)
        nn.utils.clip_grad_norm_ = self._clip
        self._open.callback(setattr, torch, "clear_autocast_cache", _END_AUTOCAST)
        torch.clear_autocast_cache = self._on_autocast_end
        self._open.enter_context(grouped_where_they_will_be(self._device))
        for owner, name, method in methods_of_shards(self._units):
            self._open.callback(setattr, owner, name, method)
            setattr(owner, name, self._putting_off(method))
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True
        return self._region

    def _new_region(self) -> Region:
        return Region(self._root, self._own, self._device.type, self._attributes, self._units)

    def _current(self) -> Region | None:
        """Return where the loop is, if an exception that it handles now has not ended that."""
        if self._region is not None and sys.exception() not in (None, self._handled):
            self._give_up()
        return self._region

    def _give_up(self) -> None:
        """End the region without its step: what was put off runs as written."""
        region, self._region = self._region, None
        self._gradients.leave()
        if region is not None and region.is_known:
            with suppress(CaptureError):  # which uses of what is not there will tell
                region.catch_up(self._real)

    def _evaluate_within(self, region: Region) -> None:
        """End a region that the loop has most likely left, by an exception that nobody told of."""
        self._num_new += 1
        if self._num_new > MOST_NEW:
            self._leave()
            region.check_unchanged()
        if region.is_known:
            with _pop_mode_temporarily():
                region.catch_up_behind_eval(self._real)
        self._give_up()

    def _on_autocast_end(self) -> None:
        if self._region is not None and not self._is_running:
            self._region.num_blocks += 1
        _END_AUTOCAST()

    def _on_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_running or function in OF_FORM:
            return function(*args, **kwargs)
        region = self._current()
        if region is None:
            return function(*args, **kwargs)
        if function in OF_PLACE:
            with self._left_if_it_fails():
                return function(*region.placed(args[:1]), *args[1:], **kwargs)
        if function is Tensor.__deepcopy__ and region.touches(args[0]):
            tensor, memo = args  # the dict is another one each time
            memo[id(tensor)] = copy = self._on_function(copied, (tensor,), {})
            return copy
        if function == _GRADIENT_OF:
            frame = sys._getframe(2)
            if frame.f_code in _ZERO_GRADS:
                self._zero_whole(frame)
                return None  # and so it does nothing by itself
            self._gradients.look_at(args[:1])
        elif function == _SET_GRADIENT and args[1] is None and region.owns(args[0]):
            self._gradients.zero(args[:1], drops=True)
        with self._left_if_it_fails():
            return region.do(function, args, kwargs, self._real, only_if_touched=True)

    def _on_zero_grad(self, owner: Any, args: Any, kwargs: Any) -> Any:
        zero_grad = self._zeroing[id(owner)]
        is_going_on = not self._is_running and self._current() is not None
        to_none = bool([*args, *kwargs.values(), True][0])
        self._gradients.zero(params_of(owner), drops=is_going_on and to_none)
        if not is_going_on:
            return zero_grad(*args, **kwargs)
        return self._do_whole(zero_grad, args, kwargs)

    def _running_on(self, region: Region) -> str | None:
        """Return whose gradient the iteration has used that an earlier one has left, if any."""
        lost = self._gradients.lost()
        if lost is not None:
            raise refusal(
                f"the loop looks at the gradient of {self._name_of(lost)}, which it neither steps "
                "nor zeroes; such gradients add up, and replays have not added to it",
                "zero_grad() of the whole model in each iteration, or requires_grad_(False) on "
                "what is not trained",
            )
        used = self._gradients.used()
        if region.is_known and not used:
            self._gradients.overwrite()
        self._gradients.leave()
        return self._name_of(used[0]) if used else None

    def _name_of(self, key: int) -> str:
        named = (pair for model in self._models for pair in model.named_parameters())
        return next((repr(name) for name, param in named if id(param) == key), "a parameter")

    def _zero_whole(self, frame: FrameType) -> None:
        """Note ``zero_grad`` as one call; an attribute of a model would be pickled."""
        if self._zeroing_frame is not frame:
            self._zeroing_frame = frame
            owner, to_none = frame.f_locals["self"], frame.f_locals["set_to_none"]
            self._gradients.zero(params_of(owner), drops=to_none)
            assert self._region is not None
            with self._left_if_it_fails():
                self._region.do(owner.zero_grad, (to_none,), {}, self._real)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        step = self._steps[id(optimizer)]
        if self._is_running:
            return step(*args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        loss = None
        if given:
            if len(given) > 1 or not callable(given[0]) or not calls_first(optimizer):
                self._leave()
                raise ConfigError(
                    f"{type(optimizer).__name__}.step(...) may run the model within the step, or "
                    "between its parts. Remedy: loss = closure() and optimizer.step(), which is "
                    "the same where the optimizer calls it once and first; otherwise "
                    "graphfsdp.capture(..., scope='forward_backward')"
                )
            with torch.enable_grad():
                loss = given[0]()
        self._end_with(optimizer, step)
        return loss

    @_whole
    def _end_with(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        region = self._current()
        if region is None:
            step()
            self._count_passed_by()
            return
        self._do(self._step_calls[id(optimizer)], (), {})
        region.stepped.add(id(optimizer))
        if len(region.stepped) < len(self._optimizers):
            return
        self._leave()
        try:
            self._finish(region)
        except BaseException as error:
            if region.is_known:
                region.lose(error)
            raise

    def _count_passed_by(self) -> None:
        """Refuse a loop all of whose iterations run as written; one that trains others may."""
        source, self._passed_by = self._passed_by, None
        if source is None:
            return
        self._num_new += 1
        if self._num_new > MOST_NEW:
            raise refusal(
                "each iteration begins with a tensor that requires a gradient, of a model that "
                f"capture_in_place was not given, and so {MOST_NEW + 1} in a row ran as written",
                "give capture_in_place that model as well; detach() the tensor if the model is not "
                "trained",
                source=source,
            )

    def _finish(self, region: Region) -> None:
        region.check_unwritten()
        if region.is_known:
            region.check_unchanged()
        runs_on = self._running_on(region)
        if runs_on is not None and region.is_known:
            region.catch_up(self._real)  # which adds to the gradients that are there
        if region.is_known:
            self._num_new = 0
            self._replay(region)
            return
        self._num_new += 1
        if self._num_new > MOST_NEW:
            raise region.refusal_of_new() if runs_on is None else of_gradients(runs_on)

    def _clip(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the many calls that this makes as one."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._is_running or self._current() is None:
            return _CLIP(params, *args, **kwargs)
        self._gradients.look_at(params)
        return self._do_whole(_CLIP, (params, *args), kwargs)

    def _putting_off(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return what notes a method that is no function of torch's, as the mode does those."""

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running or _get_current_function_mode() is not self._mode:
                return method(*args, **kwargs)
            if isinstance(args[0], nn.Module):
                self._do_whole(method, args[:1], {})
                return handle_for(*args, **kwargs)
            with _pop_mode_temporarily():
                return self._on_function(method, args, kwargs)

        return call

    def _do(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._region is not None
        with self._left_if_it_fails(), _pop_mode_temporarily():
            return self._region.do(function, args, kwargs, self._real)

    _do_whole = _whole(_do)

    @contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._give_up()  # what its mode sees goes through; the next call of a model ends it
            raise

    def _leave(self) -> None:
        self._region = self._zeroing_frame = self._handled = None
        self._signals = SIGNALS
        self._open.close()
        if self._is_on:
            self._is_on = False
            is_ours = _get_current_function_mode() is self._mode
            # Takes off whatever is on top.
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if not is_ours:
                raise ConfigError(
                    "a context of torch (a device, a torch function mode) begins before the "
                    "model's call and ends before the optimizer's step, or the other way round. "
                    "Remedy: put both into it, or neither"
                )

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _real(self, run: Callable[..., Any], made: dict[int, Any], given: list[Tensor]) -> Any:
        with (
            DeferredInterrupts(self._signals),
            InterruptibleIteration(asks=False),
            self._running(),
            self._adapted.stepping(),
        ):
            return run(made, given)

    @staticmethod
    def _step_of(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def _replay(self, region: Region) -> None:
        index = self._program(region)
        region.check_undrawn()
        if self._step is None:
            self._step = capture(*self._arguments(), iteration=self._iterate, **self._options)
        self._gradients.drop()
        results = self._step(index, *region.given)
        with torch.no_grad():
            region.fill(dict(zip(self._programs[index].kept, results, strict=True)))

    def _arguments(self) -> tuple[Any, Any]:
        """Return models and optimizers as ``capture`` takes them."""
        models = [self._as_written(model) for model in self._models]
        optimizers = self._optimizers
        return (
            models[0] if len(models) == 1 else models,
            optimizers[0] if len(optimizers) == 1 else optimizers,
        )

    def _program(self, region: Region) -> int:
        end, kept = region.point, region.kept()
        flags = [(Own(self._own[key]), flag) for key, flag in region.flags.items()]
        for index, program in enumerate(self._programs):
            is_same = program.end is end and program.flags == flags
            if is_same and set(kept) <= set(program.kept):
                return index
        self._programs.append(Program(end.calls(), kept, end, flags))
        return len(self._programs) - 1

    def _iterate(self, models: Any, optimizers: Any, index: int, *given: Tensor) -> list[Any]:
        with self._running():
            return self._programs[index].run(given, self._device.type, self._units)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()
