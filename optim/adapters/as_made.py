"""Optimizers of torch as users make them, captured by what is turned on while they step.

Between steps ``param_groups`` are as the user has made them: plain numbers, no flag of ours. So
schedulers compute in Python's floats, checkpoints stay as they were, and the optimizer goes on by
itself when the captured step is closed.

Shapes: G = parameter groups; [] is a 0-D tensor.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode

from graphfsdp.base.dtensors import is_dtensor, num_meshes
from graphfsdp.base.torch_internals import without_modes
from graphfsdp.config import Scope
from graphfsdp.errors import ConfigError
from graphfsdp.optim.adapters.baked import BakedAdapter, Word
from graphfsdp.optim.adapters.grouped_step import GroupedStep, is_torchs_step
from graphfsdp.optim.fused.live_optimizer import LiveMemory

# Note [Flags]: what is turned on for a step, where a group has the flag:
#
#                                      a CPU                     CUDA
# capturable=True                      RAdam, ASGD               all
# fused=True, where neither fused      where steps may be        Adam, AdamW, SGD
#   nor foreach was given              skipped, likewise
# foreach=True, unless given as False  -                         with capturable, without fused
#
# torch puts parameters on several meshes, or DTensors beside plain tensors, into no list, so that
# neither fused nor foreach is turned on for these.

# Those that decide by the step count what to compute, unless they are told to be capturable.
_NEED_FLAG = (torch.optim.RAdam, torch.optim.ASGD)
# They read numbers of the iteration on the host, and have no other path.
_NEVER = (torch.optim.SparseAdam, torch.optim.Adafactor)
_SUPPORTED = "_get_capturable_supported_devices"


def is_as_made(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is one of torch that has a path which a graph can hold."""
    of_torch = [cls for cls in type(optimizer).__mro__ if _is_torchs(cls)]
    return len(of_torch) > 1 and not isinstance(optimizer, _NEVER)  # the last is the base of all


def _is_torchs(cls: Any) -> bool:
    is_optimizer = issubclass(cls, torch.optim.Optimizer)
    return is_optimizer and f"{cls.__module__}.".startswith("torch.optim.")


class TorchAdapter(BakedAdapter):
    """An optimizer of torch, made with or without ``fused`` and ``capturable``; lr is live."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        # Eager steps of a capturable optimizer are on purpose here; torch would warn about them.
        vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True
        self._is_stepping = False
        self._must_skip = False
        # What somebody else's step makes of an lr that is a tensor, nobody knows.
        self._is_plain = type(optimizer).step.__module__.startswith("torch.optim.")
        # By group. Kernels of a CPU take what Python's float would be.
        self._rates = LiveMemory(len(optimizer.param_groups), dtype=torch.float32)
        self._grouped: GroupedStep | None = None
        self._reads_late = False

    def step_by_groups(self) -> None:
        grouped = GroupedStep(self.optimizer, num_own_hooks=1)  # see stepping
        self._grouped = grouped if grouped else None
        self._reads_late = True

    def prepare_skipping(self, scope: Scope) -> None:
        self._must_skip = True
        if all(self._settings(group).get("fused") for group in self.optimizer.param_groups):
            # What torch sets for fused=True: the kernel leaves a step out by itself.
            vars(self.optimizer)["_step_supports_amp_scaling"] = True
        super().prepare_skipping(scope)

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse what a fused kernel of torch cannot do."""
        super()._check_anywhere(named_params)
        fused = [group for group in self.optimizer.param_groups if group.get("fused")]
        if not fused or not isinstance(self.optimizer, torch.optim.SGD):
            return
        for name, param in named_params.items():
            if is_dtensor(param):
                raise ConfigError(
                    f"{self._name}(fused=True) cannot step on {name!r}, which is a DTensor: torch "
                    "has no rule for its fused kernel on these. Remedy: fused=False, whose lr "
                    "stays live as well"
                )
            narrow = param.device.type == "cpu" and param.dtype.itemsize < 4
            has_momentum = any(group.get("momentum") for group in fused)
            if narrow and has_momentum:
                raise ConfigError(
                    f"{self._name}(fused=True) with momentum cannot step on "
                    f"{name!r}, which is {param.dtype} on a CPU: torch's kernel for it takes part "
                    "of the momentum from memory that nothing has written (seen in torch 2.13), so "
                    "that each run trains something else. Remedy: fused=False, whose lr stays live "
                    "as well"
                )

    def _settings(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a group is to have while it is stepped; see Note [Flags]."""
        params = group["params"]
        if group.get("differentiable") or not params:
            return {}
        on_gpu = any(param.is_cuda for param in params)
        fused = self._fuses(group, on_gpu=on_gpu)
        found: dict[str, Any] = {"fused": fused}
        if on_gpu or isinstance(self.optimizer, _NEED_FLAG):
            found["capturable"] = True
        # Lists of tensors take lr as a tensor only where they are capturable; on a CPU torch has no
        # kernels for them, and goes through them one by one.
        by_lists = on_gpu and "capturable" in group and not fused and num_meshes(params) < 2
        found["foreach"] = by_lists and group.get("foreach") is not False
        return {key: value for key, value in found.items() if key in group}

    def _fuses(self, group: Mapping[str, Any], *, on_gpu: bool) -> bool:
        if group.get("fused") is not None or group.get("foreach"):
            return bool(group.get("fused"))
        params = group["params"]
        is_sgd = isinstance(self.optimizer, torch.optim.SGD)
        if not is_sgd and not isinstance(self.optimizer, torch.optim.Adam):  # AdamW is one
            return False
        if not all(param.is_floating_point() for param in params):
            return False
        # That of SGD knows no DTensors, and on a CPU no momentum in 16 bits.
        if num_meshes(params) > 1 or (is_sgd and any(map(is_dtensor, params))):
            return False
        if on_gpu:
            return True
        is_narrow = any(param.dtype.itemsize < 4 for param in params)
        return self._must_skip and not (is_sgd and group.get("momentum") and is_narrow)

    def _run_step(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        closure = next(filter(None, (*args, *kwargs.values())), None)
        num_own = 1  # see stepping; others run before the closure
        if closure and self._is_plain and len(self.optimizer._optimizer_step_pre_hooks) == num_own:
            with torch.enable_grad():  # torch's own begin with this
                loss = closure()
            self._run_step(step, (), {})
            return loss
        if self._steps_by_groups(step, args, kwargs):
            return None
        with self._with_flags() as rates:
            self._is_stepping = True
            try:
                if not self._is_plain or any(args) or any(kwargs.values()):
                    return super()._run_step(step, args, kwargs)  # as in a closure: theirs
                # Where counts are tensors, numbers meet these, too, and in Python's precision.
                counts = isinstance(self.optimizer, _NEED_FLAG)
                with LiveScalars(() if counts else rates, reads_late=self._reads_late):
                    return step()
            finally:
                self._is_stepping = False

    def _steps_by_groups(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Step by an operator for each group, where nobody has another step in its place."""
        if self._grouped is None or any(args) or any(kwargs.values()):
            return False
        if not is_torchs_step(step):
            return False
        if not self._grouped.step(self._live_rates()):
            return False
        # Schedulers warn when they have not seen a step, and torch's own was not called.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return True

    @contextmanager
    def stepping(self) -> Iterator[None]:
        def refuse_another(*_: object) -> None:
            if not self._is_stepping:
                raise ConfigError(
                    f"the iteration calls a step that was taken from {self._name} before (step = "
                    "optimizer.step, say), so that every replay would go on with the lr of the "
                    "capture. Remedy: optimizer.step() in the iteration"
                )

        hook = self.optimizer.register_step_pre_hook(refuse_another)
        try:
            with super().stepping():
                yield
        finally:
            hook.remove()

    @contextmanager
    def _with_flags(self) -> Iterator[list[Tensor | None]]:
        """Have the flags and the live lr in the groups while the body runs, in these very dicts.

        Yield [] for each group, its live lr: the groups no longer tell it from a tensor of theirs.
        """
        groups = self.optimizer.param_groups
        rates = self._live_rates()
        given = [
            self._settings(group) | ({} if rate is None else {"lr": rate})
            for group, rate in zip(groups, rates, strict=True)
        ]
        self._place_counts()
        with _in_groups(groups, given), _supported_on_cpu(self.optimizer):
            yield rates

    def _place_counts(self) -> None:
        """Put step counts and their like beside the parameters, as flagged optimizers have them."""
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                is_scalar = isinstance(value, Tensor) and not value.dim()
                if is_scalar and value.device != param.device:
                    state[key] = value.to(param.device, torch.float32)

    def _has_live_rate(self, group: Mapping[str, Any]) -> bool:
        return self._is_plain and not isinstance(group["lr"], Tensor)

    def _baked_part(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        part = super()._baked_part(group)
        return {**part, "lr": Word.NUMBER} if self._has_live_rate(group) else part

    def _live_rates(self) -> list[Tensor | None]:
        """Return [] for each group, its lr as it is now; None where it is no number, or baked."""
        self._write_rates()
        found: list[Tensor | None] = []
        with torch.no_grad(), without_modes():
            for row, group in enumerate(self.optimizer.param_groups):
                device = next((p.device for p in group["params"]), torch.device("cpu"))
                found.append(self._rates.on(device)[row] if self._has_live_rate(group) else None)
        return found

    def before_replay(self) -> None:
        super().before_replay()
        self._write_rates()

    def _write_rates(self) -> None:
        groups = self.optimizer.param_groups
        rates = [group["lr"] if self._has_live_rate(group) else 0.0 for group in groups]
        if len(rates) != len(self._rates.host):  # a guard tells of it
            self._rates = LiveMemory(len(rates), dtype=torch.float32)
        if rates != self._rates.host.tolist():
            self._rates.host[:] = rates
            self._rates.upload()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().state_tensors()
        for row, rate in enumerate(self._live_rates()):
            if rate is not None:
                yield f"lr of group {row}", rate


@contextmanager
def _in_groups(
    groups: Sequence[dict[str, Any]], given: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Have other values in these very groups while the body runs; what that writes stays."""
    before = [{key: group[key] for key in new} for group, new in zip(groups, given, strict=True)]
    for group, new in zip(groups, given, strict=True):
        group.update(new)
    try:
        yield
    finally:
        for group, new, old in zip(groups, given, before, strict=True):
            group.update({key: old[key] for key in new if group.get(key) is new[key]})


@contextmanager
def _supported_on_cpu(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch take ``capturable=True`` on a CPU while the body runs.

    It refuses since nothing is captured there; the operators of that path run anywhere.
    """
    module = sys.modules[type(optimizer).step.__module__]
    if not isinstance(optimizer, _NEED_FLAG) or not hasattr(module, _SUPPORTED):
        yield
        return
    original: Callable[..., list[str]] = getattr(sys.modules[Optimizer.__module__], _SUPPORTED)
    setattr(module, _SUPPORTED, lambda *args, **kwargs: [*original(*args, **kwargs), "cpu"])
    try:
        yield
    finally:
        setattr(module, _SUPPORTED, original)


class LiveScalars(TorchFunctionMode):
    """Keeps on the device what optimizers take for numbers of Python.

    A learning rate that changes between replays is a 0-D tensor while a step is recorded, and a
    step count is one anyway. The plain path of torch's would read both on the host, compute with
    them in Python and hand the result to operators as ``alpha`` or ``value``. A read gives a 0-D
    tensor in Python's precision here; an operator that takes numbers only is called as one that
    takes tensors: with the same bits.

    A number takes the dtype of the tensor that it meets. 0-D tensors do so where the other has
    dimensions; where it has none either (an lr that is a tensor, the product of NAdam's momenta)
    the stand-ins for numbers are known, and cast before they meet it.
    """

    def __init__(self, rates: Iterable[Tensor | None] = (), *, reads_late: bool = False) -> None:
        """``rates``: [] each, tensors that stand for numbers of the groups.

        ``reads_late``: operators of a CPU may read numbers when they run.
        """
        super().__init__()
        self._reads_late = reads_late
        self._numbers = {id(rate): rate for rate in rates if rate is not None}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "item":
            return self._number(args[0].to(torch.float64, copy=True))
        factor = kwargs.get(_FACTORS.get(name, ""))
        if not isinstance(factor, Tensor):
            if name == "div" and self._is_number(args[0]) and not self._is_number(args[1]):
                # So torch divides a number by a tensor.
                func, args = Tensor.mul, (args[1].reciprocal(), args[0])
            return self._compute(func, args, kwargs)
        target, *others = args
        if others[0].is_sparse:  # what no graph holds, and the plain step of before may be given
            return func(*args, **{**kwargs, _FACTORS[name]: factor.item()})
        # In 16 bits what is added is rounded once or twice, by its place in memory.
        reads_late = self._reads_late and not torch.is_grad_enabled()
        if target.dtype.itemsize < 4 and reads_late and type(target) in _ON_A_CPU:
            with_factor_(target, others, factor, name)
            return target
        # The others are computed in float32 there, and rounded once.
        if target.dtype.itemsize < 4 and name != "add_":
            wide = [tensor.float() for tensor in (target, *others)]
            self.__torch_function__(func, types, wide, kwargs)
            return target.copy_(wide[0])
        factor = factor.to(target.dtype)
        if name == "add_":
            return target.addcmul_(others[0], factor)
        return func(target, others[0] * factor, *others[1:])

    def _compute(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        others = [tensor for tensor in tensors if not self._is_number(tensor)]
        if not tensors or len(others) == len(tensors):
            return func(*args, **kwargs)
        if not others:
            result = func(*args, **kwargs)
            return self._number(result) if isinstance(result, Tensor) else result
        if any(tensor.dim() for tensor in others):
            return func(*args, **kwargs)
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in others))
        dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
        # In 16 bits numbers are not rounded before what is computed with them is.
        wide = torch.float32 if dtype.itemsize < 4 else dtype
        met = [arg.to(wide) if self._is_number(arg) else arg for arg in args]
        result = func(*met, **kwargs)
        return result.to(dtype) if isinstance(result, Tensor) and result.dtype is wide else result

    def _is_number(self, operand: object) -> bool:
        return id(operand) in self._numbers

    def _number(self, result: Tensor) -> Tensor:
        self._numbers[id(result)] = result
        return result


_FACTORS: Mapping[str, str] = MappingProxyType(
    {"add_": "alpha", "addcdiv_": "value", "addcmul_": "value"}
)


def _with_factor(target: Tensor, others: list[Tensor], factor: Tensor, name: str) -> None:
    getattr(target, name)(*others, **{_FACTORS[name]: factor.item()})


_ON_A_CPU = (Tensor, nn.Parameter)
_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define("with_factor_(Tensor(a!) target, Tensor[] others, Tensor factor, str name) -> ()")
_LIBRARY.impl("with_factor_", _with_factor, "CPU")
with_factor_: Callable[..., None] = torch.ops.graphfsdp.with_factor_.default
