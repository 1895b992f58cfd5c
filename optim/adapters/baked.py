"""The base of all adapters, and those whose numbers are baked into a recording, and guarded."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part, num_meshes
from graphfsdp.base.op_tensors import as_written
from graphfsdp.base.protocols import CapturableOptimizer
from graphfsdp.base.torch_internals import foreach_mul_
from graphfsdp.config import MixedPrecisionPolicy, Scope
from graphfsdp.errors import Change, ChangeKind, ConfigError
from graphfsdp.optim.adapters.precision import OptimizerFacts, check_precision, main_grad_dtype

_NOT_VALUES = frozenset({"params", "param_names"})
# Of the optimizer, so that the number outlives a captured step and is found by a checkpoint.
_SKIP_COUNTER = "_graphfsdp_skipped_steps"


class Adapter(CapturableOptimizer):
    """What all adapters share."""

    def __init__(self, optimizer: torch.optim.Optimizer, facts: OptimizerFacts) -> None:
        self.optimizer = optimizer
        self.optimizers = (optimizer,)
        self.use_decoupled_grad = facts.use_decoupled_grad
        self._facts = facts
        self._name = facts.name

    def main_grad_dtype(self, param: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
        return main_grad_dtype(param, policy, self._facts)

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        check_precision(named_params, policy, self._facts)

    def stepping(self) -> AbstractContextManager[None]:
        """Run a body that calls the optimizer's own ``step``."""
        return nullcontext()

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for row, group in enumerate(self.optimizer.param_groups):
            names = group.get("param_names")
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield f"{key} of group {row}", value
            for position, param in enumerate(group["params"]):
                name = names[position] if names else f"parameter {position} of group {row}"
                for key, value in self.optimizer.state.get(param, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{key} of {name}", value


class BakedAdapter(Adapter):
    """Any optimizer; its numbers are baked into the recording, so a change is refused."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, facts: OptimizerFacts | None = None
    ) -> None:
        package = type(optimizer).__module__.split(".")[0]
        super().__init__(
            optimizer, facts or OptimizerFacts(f"{package} {type(optimizer).__name__}")
        )
        self._skipped: Tensor | None = None  # [] float32
        self._skips_itself = False
        self._baked: BakedValues | None = None

    def check(
        self,
        named_params: Mapping[str, nn.Parameter],
        policy: MixedPrecisionPolicy,
        scope: Scope,
    ) -> None:
        super().check(named_params, policy, scope)
        if scope is Scope.FULL_ITERATION:
            self._check_inside_graph(named_params)
        self._check_anywhere(named_params)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step in the body as a recording can hold it, in each phase, so that all have its bits."""
        optimizer = self.optimizer
        own, step = vars(optimizer).get("step"), optimizer.step

        def step_here(*args: Any, **kwargs: Any) -> Any:
            return self._run_step(step, args, kwargs)

        vars(optimizer)["step"] = step_here
        try:
            yield
        finally:
            if own is None:
                vars(optimizer).pop("step", None)
            else:
                vars(optimizer)["step"] = own

    def _run_step(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step; what is compiled is not compiled on a CPU, where no recording would see in."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        on_cpu = all(param.device.type == "cpu" for param in params)
        if not on_cpu:  # torch would compile nothing under a mode
            return step(*args, **kwargs)
        with as_written():
            return step(*args, **kwargs)

    def bake(self) -> None:
        self._baked = BakedValues(map(self._baked_part, self.optimizer.param_groups))

    def changes(self) -> list[Change]:
        if self._baked is None:
            return []
        groups = map(self._baked_part, self.optimizer.param_groups)
        return self._baked.changes(groups, self._name)

    def _baked_part(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return of a group what a change of makes a recording useless."""
        return group

    def before_replay(self) -> None:
        # Schedulers warn when they have not seen a step, and a replay calls none.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def prepare_skipping(self, scope: Scope) -> None:
        self._skips_itself = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        if scope is Scope.FULL_ITERATION and not self._skips_itself:
            raise ConfigError(
                f"{self._name} cannot leave a step out by a tensor, so skip_nonfinite=True would "
                "have to read on the host whether a gradient is finite. Ways out: fused=True, if "
                "it has that; graphfsdp.optim.FusedAdam; or scope='forward_backward', which leaves "
                "the optimizer outside the graph"
            )
        for index, group in enumerate(self.optimizer.param_groups):
            if self._skips_itself and group.get("momentum") and group.get("dampening"):
                raise ConfigError(
                    f"group {index} of {self._name} has dampening={group['dampening']}, of which "
                    "torch's first step is free; which step is the first is not known on the host "
                    "where skip_nonfinite=True leaves steps out on the device. Ways out: "
                    "dampening=0; or graphfsdp.optim.FusedAdam"
                )
        self._skipped = make_skip_counter(self.optimizer)

    def skipped_steps(self) -> Tensor | None:
        return self._skipped

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().state_tensors()
        if self._skipped is not None:
            yield "number of skipped steps", self._skipped

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Scale the gradients in place before. Capture: as capturable as the optimizer is."""
        if found_inf is not None and self._skipped is not None:
            self._skipped.add_(found_inf)
            if not self._skips_itself and bool(found_inf):  # outside the graph: the host may read
                return
        if grad_scale is not None:
            attribute = "decoupled_grad" if self.use_decoupled_grad else "grad"
            found = (
                getattr(param, attribute, None)
                for group in self.optimizer.param_groups
                for param in group["params"]
            )
            # This rank's parts: a list of DTensors would have to lie on one mesh.
            grads = [local_part(grad) for grad in found if grad is not None]
            if grads:
                foreach_mul_(grads, grad_scale)
        if found_inf is None or not self._skips_itself:
            self._take_step()
            return
        make_momentum(self.optimizer)
        vars(self.optimizer)["found_inf"] = found_inf  # as torch's GradScaler hands it over
        try:
            self._take_step()
        finally:
            del vars(self.optimizer)["found_inf"]

    def _take_step(self) -> None:
        with self.stepping():
            self.optimizer.step()

    def _check_anywhere(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse kernels over lists of parameters on several meshes."""
        for index, group in enumerate(self.optimizer.param_groups):
            how = next((key for key in ("foreach", "fused") if group.get(key)), None)
            if how is not None and num_meshes(group["params"]) > 1:
                raise ConfigError(
                    f"group {index} of {self._name} has {how}=True and parameters on several "
                    "device meshes (or DTensors beside plain tensors), which torch cannot put into "
                    f"one list. Ways out: {how}=False; graphfsdp.optim.FusedAdam, which steps on "
                    "this rank's parts; a group for each mesh"
                )

    def _check_inside_graph(self, named_params: Mapping[str, nn.Parameter]) -> None:
        """Refuse an lr that would be read on the host, and apex."""
        if self._name == "apex FusedAdam":
            raise ConfigError(
                "apex FusedAdam is not captured: in a graph it would read a parameter in its "
                "gradient's dtype without a check, and leave the main weights of bfloat16 "
                "parameters as they are. Ways out: graphfsdp.optim.FusedAdam; or "
                "scope='forward_backward', which leaves the optimizer outside the graph"
            )
        for index, group in enumerate(self.optimizer.param_groups):
            lr = group.get("lr")
            for param in group["params"]:
                if isinstance(lr, Tensor) and param.device != lr.device:
                    raise ConfigError(
                        f"lr of group {index} of {self._name} is a tensor on {lr.device}, its "
                        f"parameters are on {param.device}; it would be read on the host and "
                        "baked. Move lr to the parameters' device, or use "
                        "graphfsdp.optim.FusedAdam, which reads numbers anew in each replay"
                    )


class Word(Enum):
    """What stands for a value where it is not itself that counts."""

    MISSING = "missing"
    NUMBER = "a number"


class BakedValues:
    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self._values = [
            {key: _fixed(value) for key, value in group.items() if key not in _NOT_VALUES}
            for group in groups
        ]
        # A tensor's values may change, since a replay reads them; its address may not.
        self._addresses = [
            {key: value.data_ptr() for key, value in values.items() if isinstance(value, Tensor)}
            for values in self._values
        ]

    def changes(self, groups: Iterable[Mapping[str, Any]], owner: str) -> list[Change]:
        found = []
        # A guard tells of groups that came or went.
        for index, (group, values) in enumerate(zip(groups, self._values, strict=False)):
            for key, old in values.items():
                new = group.get(key, Word.MISSING)
                if new is not old and not _equal(old, _fixed(new)):
                    found.append(_change(owner, index, key, old, _fixed(new)))
            for key, address in self._addresses[index].items():
                new = group.get(key)
                if new is values[key] and new.data_ptr() != address:
                    found.append(_change(owner, index, key, new, new))
        return found


def _fixed(value: Any) -> Any:
    """Return a tuple of a list, which files make of it, and which could be written to."""
    return tuple(value) if isinstance(value, list) else value


def _equal(old: object, new: object) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        return False  # the recording reads the old one's address
    return type(old) is type(new) and bool(old == new)


def _change(owner: str, index: int, key: str, old: object, new: object) -> Change:
    name = f"{key!r} of group {index} of {owner}"
    if isinstance(old, Tensor):
        words = ("a tensor that the graph reads", f"{_show(new)} in other memory")
        if not isinstance(new, Tensor):
            words = (words[0], _show(new))
        remedy = "write into the tensor instead (fill_ or copy_), which replays see"
        return Change(ChangeKind.BAKED_VALUE, name, *words, remedy)
    remedy = "scope='forward_backward', which leaves the optimizer outside the graph"
    if "Adam" in owner:
        remedy = "graphfsdp.optim.FusedAdam, which reads every number anew in each replay"
    if old is Word.NUMBER:
        remedy = "keep to numbers, which each replay reads anew"
    elif key == "lr":
        remedy += "; or an lr that is a tensor on the parameters' device, which stays live as well"
    return Change(ChangeKind.BAKED_VALUE, name, _show(old), _show(new), remedy)


def _show(value: object) -> str:
    if isinstance(value, Word):
        return value.value
    if isinstance(value, Tensor):
        return f"a tensor on {value.device}"
    return repr(value)


def make_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give torch's SGD zeros as its first momentum, which adds up to what its first step makes.

    A fused first step that is left out keeps memory as momentum that nothing has written (seen in
    torch 2.13).
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        for param in group["params"] if group["momentum"] else ():
            state = optimizer.state[param] if param.grad is not None else {}
            if param.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(param.grad)


def skip_counter(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return [] float32, the steps that were skipped so far; None where nobody counts."""
    found: Tensor | None = vars(optimizer).get(_SKIP_COUNTER)
    return found


def make_skip_counter(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return an optimizer's counter, [] float32; made, as zero, if need be."""
    found = skip_counter(optimizer)
    if found is None:
        device = optimizer.param_groups[0]["params"][0].device
        found = torch.zeros((), device=device)
        vars(optimizer)[_SKIP_COUNTER] = found
    return found
