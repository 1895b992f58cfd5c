"""`graphfsdp.check`: a capture whose refusals go into a list, and which is undone.

Note [A capture that is noted]: a check is a capture: the same settings are refused, the same
warm-ups run, and what follows them is recorded by a backend that watches and keeps no graph. What
would be refused is put into a list, and the iteration goes on. On a CPU an iteration is watched by
the rules of a GPU, on which the model would lie.
"""

import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device as torch_device

from graphfsdp._capture.rules.refusals import UNSUPPORTED, Refusal
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.runner import Phase, Runner
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphBackend, GraphFacts, Iterate
from graphfsdp._capture.trace.source import user_line_of
from graphfsdp._capture.trace.values import StorageInfo, refuse_dropped_tensors
from graphfsdp._capture.trees import copied
from graphfsdp.api import make_engine
from graphfsdp.base.op_tensors import OpCall, as_written, flat_tensors, storage_key
from graphfsdp.base.protocols import pipeline_stages
from graphfsdp.base.torch_internals import parameters_of
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import (
    CaptureError,
    ConfigError,
    GraphFSDPError,
    Hazard,
    HazardKind,
    HazardLog,
    InvalidLossError,
    PhaseError,
    PrecisionError,
    first_line,
    split_remedy,
)
from graphfsdp.preconditions import (
    Program,
    as_list,
    ignoring,
    inner_optimizer,
    one_module,
    refuse_arguments,
)
from graphfsdp.preflight.report import CheckReport

_TARGETS = ("cuda", "cpu")
# Of what follows a read of the device, that is another number in each run.
_READS = frozenset({HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE, HazardKind.GENERATOR})
# What Python has moved is behind these: where its number went is told already.
_MOVED = frozenset({HazardKind.BAKED_NUMBER, HazardKind.CONTROL_FLOW})
_PAGEABLE = Refusal(
    "{}; on a GPU that is a copy from pageable host memory inside the iteration, which a capture "
    "does not permit, and a replay would repeat the old contents",
    "make it on the device without host data (torch.full, torch.arange, ... with "
    "device=x.device), or make it once before the loop (a buffer)",
    HazardKind.HOST_TENSOR,
    UNSUPPORTED,
)
_DRAWN_ON_HOST = Refusal(
    "{} takes a number that was drawn in host memory (a 0-D tensor made without device=); on a GPU "
    "it is baked into the kernel's arguments",
    "draw on the device: pass device=x.device",
    HazardKind.BAKED_NUMBER,
)
# What takes tensors in host memory beside those of a GPU.
_MIXED = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"}
)
_LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
_MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
_Container = dict[Any, Any] | list[Any] | set[Any]


def check(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    iteration: Callable[..., Any] | None = None,
    scope: str | Scope = "full_iteration",
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    target: str = "cuda",
    ignore: Iterable[HazardKind | str] = (),
    **kwargs: Any,
) -> CheckReport:
    """Run one iteration under the rules of a capture, and report everything a graph cannot hold.

    The iteration runs for real, where the model lies, and what would be refused is noted and
    allowed, so that one call finds all of it. Afterwards everything is as it was, bit for bit:
    parameters, buffers, gradients, optimizer state, ``param_groups``, modes, and the generators
    of torch, Python and NumPy. (What the iteration does to other Python objects, and to memory by
    no operator, is not undone.) Three runs warm up, the fourth is judged.

    Args:
        model: As for ``capture``.
        optimizer: As for ``capture``.
        *batch: Positional arguments of one call of the captured step.
        loss_fn: As for ``capture``.
        iteration: As for ``capture``.
        scope: As for ``capture``; "none" is checked like "full_iteration".
        microbatches: As for ``capture``.
        max_grad_norm: As for ``capture``.
        mp_policy: As for ``capture``.
        target: "cuda" also reports what only a GPU would refuse, so that a machine without one
            can gate a GPU's training script; "cpu" reports what the CPU backend refuses.
        ignore: Kinds of hazards to leave out, such as "gradient".
        **kwargs: Keyword arguments of one call of the captured step.

    Returns:
        The hazards; ``report.ok`` if there are none.

    Raises:
        ConfigError: an argument is of another type, or no such target or kind exists.
    """
    options = CaptureOptions(
        scope=Scope.parse(scope), microbatches=microbatches, max_grad_norm=max_grad_norm
    )
    program = Program(model, optimizer, options, loss_fn, iteration, mp_policy)
    return check_program(program, batch, kwargs, target=target, ignore=ignore)


def check_program(
    program: Program,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    target: str = "cuda",
    ignore: Iterable[HazardKind | str] = (),
) -> CheckReport:
    """Do what ``check`` does, for a batch whose keyword arguments may have any names."""
    model, given = program.model, program.options
    if pipeline_stages(model):
        raise ConfigError(
            f"check runs an iteration of one process, and a {type(model).__name__} runs on all "
            "ranks of a pipeline. Remedy: check a stage's module with a loss of its own; or "
            "capture the schedule, which names the same and leaves everything as it was"
        )
    options = CaptureOptions(
        scope=Scope.FULL_ITERATION if given.scope is Scope.NONE else given.scope,
        microbatches=given.microbatches,
        max_grad_norm=given.max_grad_norm,
        skip_nonfinite=given.skip_nonfinite,
        audit=0,
    )
    program = replace(program, options=options)
    refuse_arguments(program)
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; expected one of {_TARGETS}")
    ignored = set(map(HazardKind.parse, ignore))
    findings = Findings()
    device, num_ops = "?", 0
    inner = [inner_optimizer(each, ignoring) for each in as_list(program.optimizer, "optimizer")]
    with (
        _untouched(one_module(model), inner) as gradients,
        findings.noting(HazardKind.CONFIG),  # what leaves nothing to go on with
    ):
        engine = make_engine(program, noting=findings.noting)
        device = str(engine.backend.device)
        judge = _Judge(engine.backend, findings, for_cuda=target == "cuda")
        engine.backend, engine.refuse = judge, findings.refuse
        runner = Runner(engine, options)
        try:
            with engine.attempt(beside=[*engine.around(), *gradients]).undone():
                while runner.phase is Phase.WARMUP:
                    runner.run(*copied((args, dict(kwargs))))
                findings.note_idle(engine.gradients.without_gradient())
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's program raises is a finding
            findings.add(_hazard_of(error))
        finally:
            num_ops = judge.num_ops
            runner.release()
    # The kernels of a compiled region are recorded on CUDA like any others.
    hazards = [h for h in findings if target == "cpu" or h.kind is not HazardKind.COMPILED]
    return CheckReport(tuple(hazards), device, target, num_ops).without(ignored)


class Findings(HazardLog):
    """What a check has found, and who notes it."""

    @contextmanager
    def noting(self, kind: HazardKind) -> Iterator[None]:
        """Note a setting that the body refuses."""
        try:
            yield
        except ConfigError as error:
            of = HazardKind.PRECISION if isinstance(error, PrecisionError) else kind
            self.add(Hazard(of, *split_remedy(str(error))))

    def refuse(self, error: CaptureError) -> None:
        """Note what a capture finds behind its iteration, unless what is told may be why."""
        hazard, kinds = error.hazard, {each.kind for each in self}
        compares = hazard.op is not None  # an operator of one run with that of another
        is_state = compares and hazard.kind is HazardKind.STATE
        moves = hazard.kind is HazardKind.BAKED_NUMBER and not compares
        if not (
            (compares and kinds & _READS) or (moves and kinds & _MOVED) or (is_state and kinds)
        ):
            self.add(hazard)

    def note_idle(self, params: Iterable[str]) -> None:
        """Note what nothing refuses and nobody wants: weights that stay, by module."""
        owners: dict[str, list[str]] = {}
        for name in params:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        for owner, names in owners.items():
            shown = ", ".join(repr(name) for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            why = (
                f"{shown}{more}: no gradient reached this in the iteration; the graph leaves it "
                "out, and will never train it, also when a later batch would"
            )
            fix = (
                "requires_grad_(False) if it is not to be trained; else let it take part in every "
                "iteration"
            )
            self.add(Hazard(HazardKind.GRADIENT, why, fix, module_path=owner))


def _hazard_of(error: Exception) -> Hazard:
    """Return what has ended the iteration."""
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


class _Judge:
    """A backend in the place of another one's, which watches an iteration and keeps no graph."""

    def __init__(self, backend: GraphBackend, findings: Findings, *, for_cuda: bool) -> None:
        self.name = backend.name
        self.device = backend.device
        self.on_capture_stream = backend.on_capture_stream
        self.give_back_memory = backend.give_back_memory
        self.begin_undo = backend.begin_undo
        self.num_ops = 0  # of the iteration that was judged; 0 before that
        self._findings = findings
        self._rules = _GpuRules if for_cuda and self.device.type == "cpu" else Watcher

    def record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
    ) -> tuple[Graph, list[Tensor]]:
        watcher = self._rules(model, self.device, hazards=self._findings)
        try:
            # A dispatch mode would not see into compiled regions.
            with as_written(), self.on_capture_stream(), watcher.watching():
                watcher.follow_streams()
                results = iterate()
                watcher.refuse_loose_streams()
        finally:
            self.num_ops = watcher.num_ops
        results = [result.clone() for result in results]
        gc.collect()  # what only a cycle holds is not held
        refuse_dropped_tensors(watcher.storages, lambda error: self._findings.add(error.hazard))
        check(watcher.has_touched)
        return _NoGraph(watcher.num_ops), results


class _NoGraph:
    effect = Effect.NONE

    def __init__(self, num_ops: int) -> None:
        self.facts = GraphFacts(None, num_ops)

    def replay(self) -> list[Tensor]:
        raise PhaseError("an iteration that check has judged is no graph")

    def compile(self) -> None: ...

    def close(self) -> None: ...


@contextmanager
def _untouched(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[list[Tensor]]:
    """Put back what modules, parameters and optimizers hold, and containers of theirs.

    Gradients are taken off meanwhile, and handed out: a capture gives those that were left on other
    memory, and a captured step of these parameters writes them.
    """
    modules = list(model.modules())
    groups = [group for each in optimizers for group in each.param_groups]
    owned = [each for module in modules for each in parameters_of(module).values()]
    owned += [param for group in groups for param in group["params"]]
    params = {id(param): param for param in owned if param is not None}
    tables = [vars(each) for each in (*modules, *optimizers, *params.values())]
    inside = [value for table in tables for value in table.values()]
    held = [each for each in inside if isinstance(each, dict | list | set)]
    kept = [(each, _items(each)) for each in [*tables, *held, *(g["params"] for g in groups)]]
    forms = [(p, p.grad, p.requires_grad, getattr(p, "grad_dtype", None)) for p in params.values()]
    for param in params.values():
        param.grad = None
    try:
        yield [grad for _, grad, *_ in forms if grad is not None]
    finally:
        for param, grad, requires_grad, grad_dtype in forms:
            param.requires_grad_(requires_grad)
            param.grad = grad
            if hasattr(param, "grad_dtype") and param.grad_dtype != grad_dtype:
                param.grad_dtype = grad_dtype
        for container, items in kept:
            _put_back(container, items)


def _items(container: _Container) -> list[Any]:
    """Return what a container holds; of a dict the keys, then the values."""
    return [*container, *(container.values() if isinstance(container, dict) else ())]


def _put_back(container: _Container, items: list[Any]) -> None:
    now = _items(container)
    if len(now) == len(items) and all(map(operator.is_, now, items)):
        return  # a class may refuse to be filled, as diffusers' FrozenDict does
    container.clear()
    if isinstance(container, dict):
        half = len(items) // 2
        container.update(zip(items[:half], items[half:], strict=True))
    elif isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)


class _GpuRules(Watcher):
    """Notes what a GPU would refuse as well: tensors that the iteration makes in host memory.

    On a CPU, these are the ones made without ``device=``: moving one to a GPU inside an iteration
    is what a capture does not permit. Everything else is taken to lie where the model does.
    """

    def __init__(self, model: nn.Module, device: torch.device, hazards: HazardLog) -> None:
        super().__init__(model, device, hazards=hazards)
        # What is made in host memory, and whether its maker takes device=.
        self._on_host: dict[StorageInfo | None, bool] = {}
        self._factories = {*torch_device._device_constructors(), *_LITERALS}

    def varies(self, tensor: Tensor) -> bool:
        """Tell whether a read of a tensor on the host is one that a capture does not permit."""
        return not self._lies_on_host(tensor) or super().varies(tensor)

    def on_function(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if self.num_quiet:
            return super().on_function(function, args, kwargs)
        name = self._moves_host_data(function, args, kwargs)
        if name:
            what = "builds a tensor from Python data"
            if function in _MOVES:
                what = "moves a tensor that the iteration made in host memory"
            self.refuse(name, _PAGEABLE.of(f"{name} {what}"))
        result = super().on_function(function, args, kwargs)
        made = flat_tensors([result])
        if _moves(function, args, kwargs):
            self._forget(made)
        elif function in self._factories and not any(isinstance(a, Tensor) for a in args):
            if _names_device(function, kwargs):
                self._forget(made)
            else:
                self._add(made, takes_device=True)
        return result

    def _moves_host_data(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> str:
        """Return the name of a function that brings data of the host onto the device, else ""."""
        if function in _LITERALS:
            position = 1 if function is Tensor.new_tensor else 0
            data = kwargs.get("data", args[position] if len(args) > position else None)
            is_empty = isinstance(data, list | tuple) and not data  # there is nothing to copy
            if isinstance(data, Tensor) or is_empty or not _names_device(function, kwargs):
                return ""
            return f"torch.{function.__name__}"
        if _moves(function, args, kwargs) and self._lies_on_host(args[0]):
            return f"Tensor.{function.__name__}"
        return ""

    def judge_op(self, call: OpCall) -> Refusal | None:
        return super().judge_op(call) or self._judge_host_tensors(call)

    def _judge_host_tensors(self, call: OpCall) -> Refusal | None:
        on_host = [tensor for tensor in call.tensors if self._lies_on_host(tensor)]
        if not on_host or len(on_host) == len(call.tensors):
            return None
        has_dims = any(tensor.dim() > 0 for tensor in on_host)
        if has_dims or call.schema_name == "aten::copy_":
            takes_device = self._take_device(on_host)
            self._forget(on_host)  # told once
            if call.schema_name not in _MIXED and takes_device:
                # No GPU runs that eagerly either: the program was written for one device.
                return None
            return _PAGEABLE.of(f"{call.op} takes a tensor that the iteration made in host memory")
        changes = super().varies
        if any(map(changes, on_host)):
            self._forget(on_host)
            return _DRAWN_ON_HOST.of(call.op)
        return None

    def note_results(self, call: OpCall, infos: Sequence[StorageInfo], result: Any) -> None:
        super().note_results(call, infos, result)
        if call.is_literal:
            self._add(flat_tensors([result]), takes_device=False)
        elif call.tensors and all(map(self._lies_on_host, call.tensors)):
            self._add(flat_tensors([result]), takes_device=self._take_device(call.tensors))

    def _lies_on_host(self, tensor: Tensor) -> bool:
        return self._info_of(tensor) in self._on_host

    def _take_device(self, tensors: Sequence[Tensor]) -> bool:
        return all(self._on_host[self._info_of(tensor)] for tensor in tensors)

    def _add(self, tensors: Sequence[Tensor], *, takes_device: bool) -> None:
        for info in map(self._info_of, tensors):
            if info is not None and not info.external:
                self._on_host[info] = takes_device or self._on_host.get(info, False)

    def _forget(self, tensors: Sequence[Tensor]) -> None:
        """Take tensors to lie where the model does from now on."""
        for tensor in tensors:
            self._on_host.pop(self._info_of(tensor), None)

    def _info_of(self, tensor: Tensor) -> StorageInfo | None:
        return self.storages.get(storage_key(tensor))


def _names_device(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    if function is Tensor.new_tensor or kwargs.get("device") is not None:
        return True
    modes = _get_current_function_mode_stack()
    return any(isinstance(mode, torch_device.DeviceContext) for mode in modes)


def _moves(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call brings a tensor onto a device."""
    if function is not Tensor.to:
        return function in _MOVES
    targets = [*args[1:], kwargs.get("device"), kwargs.get("other")]
    return any(isinstance(item, torch.device | str | Tensor) for item in targets) or any(
        isinstance(item, int) and not isinstance(item, bool) for item in args[1:2]
    )
