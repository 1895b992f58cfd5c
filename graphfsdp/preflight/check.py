"""`graphfsdp.check`: a capture whose refusals go into a list, and which is undone."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.engine import Engine
from graphfsdp._capture.phase import Phase
from graphfsdp._capture.runner import Runner
from graphfsdp._capture.trees import copied
from graphfsdp.api import make_engine
from graphfsdp.base.hazards import Hazard, HazardKind
from graphfsdp.base.sharded import pipeline_stages
from graphfsdp.base.torch_internals import parameters_of
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError
from graphfsdp.preconditions import (
    Program,
    as_list,
    ignoring,
    inner_optimizer,
    one_module,
    refuse_arguments,
)
from graphfsdp.preflight.judge import Findings, Judge
from graphfsdp.preflight.report import CheckReport

_TARGETS = ("cuda", "cpu")
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
    program = Program.of(
        model,
        optimizer,
        loss_fn=loss_fn,
        iteration=iteration,
        mp_policy=mp_policy,
        scope=scope,
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
    )
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
    ignored = {_kind(kind) for kind in ignore}
    findings = Findings()
    device, num_ops = "?", 0
    inner = [inner_optimizer(each, ignoring) for each in as_list(program.optimizer, "optimizer")]
    with (
        _untouched(one_module(model), inner) as gradients,
        findings.noting(HazardKind.CONFIG),  # what leaves nothing to go on with
    ):
        engine = make_engine(program, noting=findings.noting)
        device = str(engine.backend.device)
        judge = Judge(engine.backend, findings, for_cuda=target == "cuda")
        engine.backend, engine.refuse = judge, findings.refuse
        runner = Runner(engine, options)
        try:
            with engine.attempt(beside=[*engine.around(), *gradients]).undone():
                while runner.phase is Phase.WARMUP:
                    runner.run(*copied((args, dict(kwargs))))
                _note_settings(engine, findings)
        except ConfigError:
            raise
        except Exception as error:  # whatever the user's program raises is a finding
            findings.fail(error)
        finally:
            num_ops = judge.num_ops
            runner.release()
    return CheckReport(tuple(findings.hazards), device, target, num_ops).without(ignored)


def _kind(name: HazardKind | str) -> HazardKind:
    try:
        return HazardKind(name)
    except ValueError:
        known = ", ".join(kind.value for kind in HazardKind)
        raise ConfigError(f"unknown kind of hazard {name!r}; expected one of {known}") from None


def _note_settings(engine: Engine, findings: Findings) -> None:
    """Note what nothing refuses and nobody wants: weights that stay."""
    owners: dict[str, list[str]] = {}
    for name in engine.gradients.without_gradient():
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    for owner, names in owners.items():
        findings.hazards.add(_without_gradient(owner, names))


def _without_gradient(owner: str, names: list[str]) -> Hazard:
    shown = ", ".join(repr(name) for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return Hazard(
        HazardKind.GRADIENT,
        f"{shown}{more}: no gradient reached this in the iteration; the graph leaves it out, and "
        "will never train it, also when a later batch would",
        "requires_grad_(False) if it is not to be trained; else let it take part in every "
        "iteration",
        module_path=owner,
    )


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
    return list(container.items()) if isinstance(container, dict) else list(container)


def _put_back(container: _Container, items: list[Any]) -> None:
    now = _items(container)
    if isinstance(container, dict):
        same = len(now) == len(items) and all(
            a is b for pairs in zip(now, items, strict=True) for a, b in zip(*pairs, strict=True)
        )
    else:
        same = len(now) == len(items) and all(map(operator.is_, now, items))
    if same:  # a class may refuse to be filled, as diffusers' FrozenDict does
        return
    container.clear()
    if isinstance(container, list):
        container.extend(items)
    else:
        container.update(items)
