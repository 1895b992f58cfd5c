"""The steps of torch's optimizers on a CPU, an operator for each group instead of each parameter.

torch goes through the parameters one by one there, in a dozen operators called from Python for
each. ``torch._foreach_*`` goes through a list of tensors in C++ and calls the very same kernels,
tensor by tensor. So an operator's results are the same bits, and as no parameter has anything to do
with another one, the order among them does not matter.

In a recording such a step is one operator, ``graphfsdp::grouped_step_``.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from graphfsdp.base.torch_internals import profiler_is_on

_PLAIN = (Tensor, nn.Parameter)
# With 16 bits a list's operators round otherwise where a number comes in.
_DTYPES = (torch.float32, torch.float64)
# For a group that is told to, torch has other loops.
_OTHER_PATHS = ("foreach", "fused", "capturable", "differentiable")
_NONE: Mapping[str, Any] = MappingProxyType({})
_Group = Mapping[str, Any]
_Tensors = Any  # a list or a tuple of them, as torch has it
_State = Mapping[Tensor, Mapping[str, Any]]


def is_torchs_step(step: Callable[..., Any]) -> bool:
    """Tell whether a step is that of torch's class, and nobody has put one of theirs around it.

    Those that torch's own schedulers put around it only note that it was called.
    """
    function: Any = getattr(step, "__func__", step)
    while function is not None:
        # Names are handed on by functools.wraps, the variables of the file are not.
        file = getattr(function, "__globals__", {}).get("__name__", "")
        if not file.startswith("torch.optim."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class GroupedStep:
    """Steps one optimizer as its own ``step()`` does, where that goes parameter by parameter.

    It makes no state: what has never been stepped is left to torch.

    Attributes:
        steps_for: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, num_own_hooks: int = 0) -> None:
        """``num_own_hooks``: before its step, of ours, which a step by this need not run."""
        self.steps_for = optimizer
        self._num_own_hooks = num_own_hooks
        self._kind = _KINDS.get(type(optimizer))
        self._plans: dict[int, _Plan] = {}  # by place of the group

    def __bool__(self) -> bool:
        """Tell whether there is a loop for optimizers of this class."""
        return self._kind is not None

    def step(self, rates: Sequence[Tensor | None] = ()) -> bool:
        """Step; False, and nothing has changed, where torch's own loop is to do it.

        ``rates``: [] float64 each, the learning rates by group, to be read by an operator that
        steps.
        """
        optimizer = self.steps_for
        before = _global_optimizer_pre_hooks.values()
        is_watched = (
            any(not getattr(hook, "__module__", "").startswith("graphfsdp.") for hook in before)
            or _global_optimizer_post_hooks
            or len(optimizer._optimizer_step_pre_hooks) > self._num_own_hooks
            or optimizer._optimizer_step_post_hooks
            or profiler_is_on()
            or getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
        )
        if is_watched or self._kind is None or torch.compiler.is_compiling():
            return False
        for hook in before:  # of ours, for sharded parameters
            hook(optimizer, (), {})
        works = []
        for place, group in enumerate(optimizer.param_groups):
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            plan = self._plans.get(place)
            if plan is None or not plan.holds(group, params, optimizer.state):
                plan = self._kind.of(group, params, optimizer.state)
                if plan is None:
                    return False
                self._plans[place] = plan
            grads = [param.grad for param in params]
            dtype = params[0].dtype
            for grad in grads:
                if grad.dtype is not dtype or grad.layout is not torch.strided:
                    return False
            works.append((place, plan, group, grads))
        with torch.no_grad():
            for place, plan, group, grads in works:
                rate = rates[place] if rates else None
                if rate is None:
                    plan.step(group, grads)
                else:
                    state = [*chain.from_iterable(plan.columns)]
                    kind, settings = type(plan).__name__, plan.settings(group)
                    grouped_step_(plan.params, grads, state, rate, kind, **settings)
        return True


class _Plan(ABC):
    """The tensors of one group that are stepped together."""

    numbers: tuple[str, ...] = ()  # of a group, beside its lr
    flags: tuple[str, ...] = ()

    def __init__(self, params: list[Tensor], columns: list[list[Tensor]]) -> None:
        self.params = params
        self.columns = columns
        self._places = list(map(Tensor.data_ptr, params))

    @classmethod
    def of(cls, group: _Group, params: list[Tensor], state: _State) -> "_Plan | None":
        """Return one, or None for what torch's own loop is to do."""
        dtype = params[0].dtype
        if dtype not in _DTYPES or not cls._has_path(group):
            return None
        columns = cls._columns_of(group, params, state)
        for tensor in chain(params, *columns):
            if type(tensor) not in _PLAIN or not tensor.is_cpu:
                return None
            if tensor.layout is not torch.strided or tensor.dtype not in (dtype, torch.float32):
                return None
        if any(tensor.dtype is not dtype for tensor in params):
            return None
        # In memory that two parameters share, the order of their steps does matter.
        storages = {param.untyped_storage().data_ptr() for param in params}
        return cls(params, columns) if len(storages) == len(params) else None

    @classmethod
    def _columns_of(cls, group: _Group, params: list[Tensor], state: _State) -> list[list[Any]]:
        names = cls.names_in(group)
        states = [state.get(param, _NONE) for param in params] if names else ()
        return [[entries.get(name) for entries in states] for name in names]

    @classmethod
    @abstractmethod
    def names_in(cls, group: _Group) -> tuple[str, ...]:
        """Return the names of the state that a step takes."""

    @classmethod
    def _has_path(cls, group: _Group) -> bool:
        numbers = (group["lr"], *cls._numbers_of(group))
        is_plain = all(type(value) in (float, int) for value in numbers)
        return is_plain and not any(group.get(name) for name in _OTHER_PATHS)

    def holds(self, group: _Group, params: list[Tensor], state: _State) -> bool:
        if len(params) != len(self.params) or not self._has_path(group):
            return False
        # `.data = ...` may have two of them share memory since.
        if self._places != list(map(Tensor.data_ptr, params)):
            return False
        columns = self._columns_of(group, params, state)
        return len(columns) == len(self.columns) and all(
            all(map(operator.is_, *pair))
            for pair in zip((self.params, *self.columns), (params, *columns), strict=True)
        )

    def settings(self, group: _Group) -> dict[str, Any]:
        """Return what an operator is told of a group for good."""
        numbers = zip(self.numbers, map(float, self._numbers_of(group)), strict=True)
        return {**dict(numbers), **{name: bool(group[name]) for name in self.flags}}

    @classmethod
    def _numbers_of(cls, group: _Group) -> list[Any]:
        return [group[name] for name in cls.numbers]

    @abstractmethod
    def step(self, group: _Group, grads: _Tensors) -> None:
        """Step all parameters, as torch's loop does one by one."""


class _Adam(_Plan):
    """torch's ``_single_tensor_adam``."""

    numbers = ("weight_decay", "eps", "beta1", "beta2")
    flags = ("amsgrad", "maximize", "decoupled_weight_decay")

    @classmethod
    def names_in(cls, group: _Group) -> tuple[str, ...]:
        names = ("step", "exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    @classmethod
    def _numbers_of(cls, group: _Group) -> list[Any]:
        return [group["weight_decay"], group["eps"], *group["betas"]]

    def step(self, group: _Group, grads: _Tensors) -> None:
        params, (counts, means, squares, *rest) = self.params, self.columns
        lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        torch._foreach_add_(counts, 1)
        if decay != 0:
            if group["decoupled_weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * decay)
            else:
                grads = torch._foreach_add(grads, params, alpha=decay)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        for largest in rest:
            for most, square in zip(largest, squares, strict=True):
                torch.maximum(most, square, out=most)
            squares = largest
        steps = list(map(Tensor.item, counts))
        roots = torch._foreach_sqrt(squares)
        if steps.count(steps[0]) == len(steps):
            root, size = _corrections(steps[0], lr, beta1, beta2)
            torch._foreach_div_(roots, root)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(params, means, roots, -size)
        else:
            corrections = [_corrections(step, lr, beta1, beta2) for step in steps]
            torch._foreach_div_(roots, [root for root, _ in corrections])
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_addcdiv_(params, means, roots, [-size for _, size in corrections])


def _corrections(step: float, lr: float, beta1: float, beta2: float) -> tuple[float, float]:
    """Return the root of the second bias correction, and the step's size."""
    bias_correction1 = 1 - beta1**step
    bias_correction2 = 1 - beta2**step
    return bias_correction2**0.5, lr / bias_correction1


class _SGD(_Plan):
    """torch's ``_single_tensor_sgd``."""

    numbers = ("weight_decay", "momentum", "dampening")
    flags = ("nesterov", "maximize")

    @classmethod
    def names_in(cls, group: _Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def step(self, group: _Group, grads: _Tensors) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        if group["maximize"]:
            grads = torch._foreach_neg(grads)
        if decay != 0:
            grads = torch._foreach_add(grads, self.params, alpha=decay)
        if momentum != 0:
            (buffers,) = self.columns
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, grads, alpha=1 - group["dampening"])
            if group["nesterov"]:
                grads = torch._foreach_add(grads, buffers, alpha=momentum)
            else:
                grads = buffers
        torch._foreach_add_(self.params, grads, alpha=-group["lr"])


_KINDS: Mapping[type, type[_Plan]] = MappingProxyType(
    {torch.optim.Adam: _Adam, torch.optim.AdamW: _Adam, torch.optim.SGD: _SGD}
)


_LIBRARY = torch.library.Library("graphfsdp", "FRAGMENT")  # a registration lives as long as it
_LIBRARY.define(
    "grouped_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor lr, str kind, "
    "*, float weight_decay, float eps=0, float beta1=0, float beta2=0, float momentum=0, "
    "float dampening=0, bool maximize=False, bool amsgrad=False, "
    "bool decoupled_weight_decay=False, bool nesterov=False) -> ()"
)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    state: list[Tensor],
    lr: Tensor,
    kind: str,
    **settings: Any,
) -> None:
    """Step; the state lies in it name by name. Torch leaves settings out that are the default."""
    plan, num = _BY_NAME[kind], len(params)
    columns = [state[start : start + num] for start in range(0, len(state), num)]
    group = {name: settings.get(name, 0) for name in (*plan.numbers, *plan.flags)}
    group |= {"lr": lr.item(), "betas": (group.get("beta1"), group.get("beta2"))}
    with torch.no_grad():
        plan(params, columns).step(group, grads)


_BY_NAME = MappingProxyType({each.__name__: each for each in (_Adam, _SGD)})
grouped_step_: Callable[..., None] = torch.ops.graphfsdp.grouped_step_.default
_LIBRARY.impl("grouped_step_", _run, "CPU")
