"""What model, optimizer and options must be like before anything is captured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.iteration import CustomIteration, Iteration, default_loss
from graphfsdp._capture.pipelines import Pipeline, PipelineIteration, pipeline_of
from graphfsdp._capture.trace.source import compiled_modules
from graphfsdp.base.protocols import IGNORED, CapturableOptimizer, put_back, sharded_roots, units_of
from graphfsdp.config import CaptureOptions, MixedPrecisionPolicy, Scope
from graphfsdp.errors import ConfigError, HazardKind, PrecisionError
from graphfsdp.optim.adapters.backends import JointOptimizer, UnsteppedOptimizer, adapt
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.optim.fused.adam import FusedAdam

_MAX_LISTED = 5
# Runs what may find settings of some kind wrong: a capture lets the error through, a check notes it
# and goes on.
Noting = Callable[[HazardKind], AbstractContextManager[None]]
# Packages whose optimizer wrappers only decide when the inner optimizer steps, which a captured
# step decides by itself. Other wrappers (Lookahead and its like) are optimizers of their own.
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


@dataclass(frozen=True)
class Program:
    """What is to be captured or checked, as its user has given it."""

    model: Any  # a module, a sequence of them, or a schedule of a pipeline
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    options: CaptureOptions
    loss_fn: Callable[..., Any] | None = None
    iteration: Callable[..., Any] | None = None
    mp_policy: MixedPrecisionPolicy | None = None


def raising(_: HazardKind) -> AbstractContextManager[None]:
    return nullcontext()


def ignoring(_: HazardKind) -> AbstractContextManager[None]:
    return suppress(ConfigError)


def inner_optimizer(optimizer: object, noting: Noting = raising) -> torch.optim.Optimizer:
    """Return the optimizer without the wrapper that Accelerate or Fabric put around it."""
    inner: Any = optimizer
    while _is_wrapper(inner):
        with noting(HazardKind.OPTIMIZER):
            if getattr(inner, "scaler", None) is not None:
                package = type(inner).__module__.partition(".")[0]
                raise ConfigError(
                    f"{package}'s {type(inner).__name__} scales the loss with a GradScaler, which "
                    "reads on the host whether a gradient is finite. Remedy: "
                    "mixed_precision='bf16' or 'no'"
                )
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return inner


def _is_wrapper(optimizer: object) -> bool:
    # A wrapper may be a child of what it wraps, made on the way: of a class that is ABC's, say.
    packages = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    inner = getattr(optimizer, "optimizer", None)
    return not packages.isdisjoint(_WRAPPERS) and isinstance(inner, torch.optim.Optimizer)


def refuse_opaque_modules(model: nn.Module) -> None:
    """Refuse modules whose work lies in C++, out of sight: DDP's collectives, TorchScript."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{where} is TorchScript, whose attributes lie in C++, where nothing sees that "
                "they change. Ways out: the module as it was before torch.jit.script or trace, "
                "with the same state_dict; capture_in_place, which runs it as written; "
                "or scope='none'"
            )
        if isinstance(module, DistributedDataParallel | DataParallel):
            raise ConfigError(
                f"{where} is wrapped in {type(module).__name__}, whose collectives are issued by "
                "C++ code that a recording does not see whole. Remedy: leave the wrapper off and "
                "call graphfsdp.fully_shard(model, strategy='no_shard'), which averages the "
                "gradients inside the graph, or stay eager with scope='none'"
            )


def refuse_compiled_modules(model: nn.Module, device: torch.device) -> None:
    """Refuse modules of torch.compile on a CPU, before minutes are spent on compiling them."""
    for name in compiled_modules(model) if device.type == "cpu" else ():
        where = f"module {name!r}" if name else "the model"
        raise ConfigError(
            f"{where} is compiled by torch.compile; its kernels are invisible to a recording "
            "on a CPU and would be missing from every replay. Remedy: capture the uncompiled "
            "model on a CPU (on CUDA compiled kernels are captured)"
        )


def refuse_arguments(program: Program) -> None:
    """Refuse what a caller without a type checker may get wrong, and what does not go together."""
    for item in as_list(program.optimizer, "optimizer"):
        inner_optimizer(item, ignoring)
    if program.iteration is None:
        _refuse_several(program.model, program.optimizer)
    else:
        _refuse_beside_iteration(program.iteration, program.options)
    loss_fn, mp_policy = program.loss_fn, program.mp_policy
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"mp_policy must be a MixedPrecisionPolicy, got {type(mp_policy).__name__}"
        )


class Trained:
    """What a program trains, and how, if its settings work or were noted.

    Attributes:
        module: Holds all of its models, of a pipeline those of this rank.
        device: Of all of it.
        adapted: The optimizers as a graph steps them; they take no step where they are unfit and
            that was noted.
    """

    def __init__(self, program: Program, noting: Noting = raising) -> None:
        """ConfigError: the settings leave nothing to go on with."""
        self._program = program
        self._pipeline = pipeline_of(program.model)
        models = program.model if self._pipeline is None else self._pipeline.module
        self.module = model = one_module(models)
        self._inner = optimizers = [
            inner_optimizer(item, noting) for item in as_list(program.optimizer, "optimizer")
        ]
        is_default, options = program.iteration is None, program.options
        if self._pipeline is not None:
            loss_fn = program.loss_fn if is_default else None
            refuse_beside_pipeline(self._pipeline, optimizers, options, loss_fn)
        put_back(units_of(model))
        if options.scope is not Scope.NONE:
            refuse_opaque_modules(model)
            refuse_offloaded_shards(model)
        for optimizer in optimizers:
            adopt_sharded_parameters(model, optimizer)
        params = trainable_of_all(model, optimizers)
        self.device = only_device(model, params)
        with noting(HazardKind.CONFIG):
            refuse_unreduced_parameters(model, params)
        adapted = _adapt_all(optimizers, noting)
        self.policy = MixedPrecisionPolicy(use_decoupled_grad=adapted.use_decoupled_grad)
        with noting(HazardKind.PRECISION):
            self.policy = precision_of(model, adapted, program.mp_policy)
        self.adapted: CapturableOptimizer = UnsteppedOptimizer([adapted])
        with noting(HazardKind.OPTIMIZER):
            if options.skip_nonfinite:
                adapted.prepare_skipping(options.scope)
            adapted.check(params, self.policy, options.scope)
            self.adapted = adapted
        for item in optimizers if is_default else ():
            refuse_foreign_optimizer(model, item)

    def find_params(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters that there are now."""
        found = trainable_of_all(self.module, self._inner)
        self.adapted.check(found, self.policy, self._program.options.scope)
        return found

    def make_iteration(self, gradients: PersistentGradients) -> Iteration:
        """Return what trains once: the user's function, a pipeline's schedule, or the default."""
        program, pipeline, options = self._program, self._pipeline, self._program.options
        loss_fn = program.loss_fn or default_loss
        if program.iteration is not None:
            return CustomIteration(
                program.iteration,
                program.model,
                program.optimizer,
                self.module,
                self.adapted,
                gradients,
                loss_fn=loss_fn,
                groups=() if pipeline is None else (pipeline.group,),
            )
        if pipeline is not None:
            return PipelineIteration(
                pipeline,
                self.adapted,
                gradients,
                max_grad_norm=options.max_grad_norm,
                skip_nonfinite=options.skip_nonfinite,
            )
        return Iteration(
            self.module,
            self.adapted,
            gradients,
            loss_fn=loss_fn,
            max_grad_norm=options.max_grad_norm,
            skip_nonfinite=options.skip_nonfinite,
        )


def _adapt_all(optimizers: Sequence[torch.optim.Optimizer], noting: Noting) -> CapturableOptimizer:
    fit: list[CapturableOptimizer] = []
    for optimizer in optimizers:
        with noting(HazardKind.OPTIMIZER):
            fit.append(adapt(optimizer))
    if len(fit) < len(optimizers):
        return UnsteppedOptimizer([*map(BakedAdapter, optimizers)])
    return fit[0] if len(fit) == 1 else JointOptimizer(fit)


def precision_of(
    model: nn.Module, optimizer: CapturableOptimizer, given: MixedPrecisionPolicy | None
) -> MixedPrecisionPolicy:
    """Return the given policy, or the one that optimizer and sharding come to."""
    policy = given or MixedPrecisionPolicy(use_decoupled_grad=optimizer.use_decoupled_grad)
    grads = [grad for root in sharded_roots(model) for grad in root.main_grads().values()]
    for grad in grads:
        if grad.decoupled != policy.use_decoupled_grad:
            who = "capture's mp_policy" if given else type(optimizer.optimizers[0]).__name__
            raise PrecisionError(
                f"fully_shard has use_decoupled_grad={grad.decoupled} and so binds gradients to "
                f"{'decoupled_grad' if grad.decoupled else 'grad'}, but {who} has "
                f"use_decoupled_grad={policy.use_decoupled_grad}: nothing would be trained. Ways "
                "out: MixedPrecisionPolicy(use_decoupled_grad=...) for fully_shard as the "
                "optimizer has it, or FusedAdam(use_decoupled_grad=...) as fully_shard has it"
            )
        if policy.main_grads_dtype not in (None, grad.view.dtype):
            raise PrecisionError(
                f"fully_shard has main grads in {grad.view.dtype}, but capture's mp_policy says "
                f"main_grads_dtype={policy.main_grads_dtype}. Remedy: leave mp_policy out, or "
                "give both the same"
            )
    dtypes = {grad.view.dtype for grad in grads}
    if given is None and len(dtypes) == 1:
        return dataclasses.replace(policy, main_grads_dtype=dtypes.pop())
    return policy


def adopt_sharded_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that was made before ``fully_shard`` the parameters that it made."""
    replaced: dict[int, nn.Parameter] = {}
    for root in sharded_roots(model):
        replaced.update(root.replaced_parameters())
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in replaced and param in optimizer.state:
                raise ConfigError(
                    "the optimizer has state of whole parameters, from before fully_shard: it "
                    "has stepped, or has its state from the start, as Adagrad has. Remedy: make "
                    "it after fully_shard"
                )
        group["params"] = [replaced.get(id(param), param) for param in group["params"]]


def refuse_unreduced_parameters(model: nn.Module, named_params: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that each rank would train for itself beside those that are sharded."""
    roots = sharded_roots(model)
    groups = {group for root in roots for group in root.process_groups() if group.size() > 1}
    if not groups:
        return
    ranks = {rank for group in groups for rank in dist.get_process_group_ranks(group)}
    reduced = {param for root in roots for param in root.main_grads()}
    alone = [
        name
        for name, param in named_params.items()
        if param not in reduced and not ranks <= _ranks_of(param) and not hasattr(param, IGNORED)
    ]
    if alone:
        listed = ", ".join(map(repr, alone[:_MAX_LISTED]))
        more = f" and {len(alone) - _MAX_LISTED} more" if len(alone) > _MAX_LISTED else ""
        raise ConfigError(
            f"each rank would train {listed}{more} for itself: fully_shard has taken other "
            f"parameters, but not {'this one' if len(alone) == 1 else 'these'}, so nobody reduces "
            f"{'its gradient' if len(alone) == 1 else 'their gradients'} over the ranks, whose "
            "weights would drift apart. Ways out: fully_shard around the outermost module as well "
            "(strategy='no_shard' keeps a whole copy on each rank), requires_grad_(False), or, for "
            "what is no parameter of the model any more, an optimizer that is made behind "
            "parallelize_module and fully_shard"
        )


def refuse_offloaded_shards(model: nn.Module) -> None:
    """Refuse a graph of a model whose weights come from the CPU's memory and go back there."""
    if any(root.is_offloaded() for root in sharded_roots(model)):
        raise ConfigError(
            "fully_shard was given a CPUOffloadPolicy: its weights and gradients are copied from "
            "and to the CPU's memory in each iteration, and the host waits for that, which no "
            "graph can hold. Remedy: scope='none'"
        )


def _ranks_of(param: Tensor) -> set[int]:
    """Return the ranks whose gradients torch itself reduces for a DTensor."""
    mesh = getattr(param, "device_mesh", None)
    return set() if mesh is None else set(mesh.mesh.flatten().tolist())


def trainable_of_all(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of the model, and the optimizers' own, each once."""
    found = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in found.items():
        if is_lazy(param):
            raise ConfigError(
                f"parameter {name!r} of a lazy module has no shape yet. Remedy: run the model "
                "once on a batch, then make the optimizer and capture"
            )
    known = {id(param) for param in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        for row, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                if id(param) in known or not param.requires_grad:
                    continue
                known.add(id(param))
                name = f"optimizer.param_groups[{row}]['params'][{index}]"
                found[f"{name} of optimizer {number}" if name in found else name] = param
    if not found:
        raise ConfigError(
            "there is nothing to train: no parameter of the model or optimizer requires a "
            "gradient. Remedy: requires_grad_(True) on what is to be trained"
        )
    return found


def refuse_foreign_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if trainable and not trainable & held:
        raise ConfigError(
            f"the optimizer ({type(optimizer).__name__}) holds none of the model's "
            f"{len(trainable)} trainable parameters, so the model would never be trained. Remedy: "
            "make the optimizer from the parameters that the model has now; a copy of a model, or "
            "one that was made again, has others"
        )


def only_device(model: nn.Module, named_params: dict[str, nn.Parameter]) -> torch.device:
    named = {**named_params, **dict(model.named_parameters()), **dict(model.named_buffers())}
    first: dict[torch.device, str] = {}
    for name, tensor in named.items():
        first.setdefault(tensor.device, name)
    if len(first) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in first.items())
        raise ConfigError(
            f"one graph lies on one device, but the model has {where}. Remedy: model.to(device)"
        )
    return next(iter(first))


def as_list(value: object, name: str) -> list[Any]:
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not items:
        raise ConfigError(f"{name} is an empty sequence; expected at least one")
    return items


def one_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return the model, or one that holds several; these do not notice."""
    if isinstance(model, nn.Module):
        return model
    models = as_list(model, "model")
    for item in models:
        if not isinstance(item, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, got {type(item).__name__}")
    return nn.ModuleList(models)


def _refuse_several(model: object, optimizer: object) -> None:
    """Only a user's own iteration can train several."""
    for name, value in (("model", model), ("optimizer", optimizer)):
        if isinstance(value, list | tuple):
            raise ConfigError(
                f"{name} is a sequence, and the default iteration trains one model with one "
                "optimizer. Remedy: iteration=fn, where fn(models, optimizers, *batch) does the "
                "whole iteration"
            )


def refuse_beside_pipeline(
    pipeline: Pipeline,
    optimizers: Sequence[torch.optim.Optimizer],
    options: CaptureOptions,
    loss_fn: object,
) -> None:
    """Refuse what would be of one stage and not of the pipeline, or has no meaning in one."""
    name = pipeline.name
    if loss_fn is not None:
        raise ConfigError(f"the {name} has a loss_fn of its own. Remedy: capture without loss_fn")
    if options.microbatches != 1:
        raise ConfigError(
            f"the {name} splits the batch into {pipeline.num_microbatches} microbatches by itself. "
            f"Remedy: n_microbatches of the {name}, and capture without microbatches"
        )
    shares = bool(sharded_roots(pipeline.module))
    for optimizer in optimizers:
        if isinstance(optimizer, FusedAdam):
            flag = torch.zeros(()) if options.skip_nonfinite else None
            if optimizer.control.needs_norm(flag):
                raise ConfigError(
                    f"{type(optimizer).__name__} clips or skips by what one stage knows of its "
                    "gradients, and the stages of a pipeline must do the same. Remedy: "
                    "max_grad_norm and skip_nonfinite of graphfsdp.capture, which ask all stages"
                )
        if pipeline.splits_backward and (shares or getattr(optimizer, "use_decoupled_grad", False)):
            raise ConfigError(
                f"the {name} computes gradients of weights apart and adds them to .grad, where "
                f"{'fully_shard' if shares else 'use_decoupled_grad'} does not have them. Remedy: "
                "Schedule1F1B or ScheduleInterleaved1F1B"
            )


def _refuse_beside_iteration(iteration: object, options: CaptureOptions) -> None:
    if not callable(iteration):
        raise ConfigError(f"iteration must be a function, got {type(iteration).__name__}")
    remedies = {
        "microbatches": (options.microbatches != 1, "split the batch in iteration"),
        "max_grad_norm": (
            options.max_grad_norm is not None,
            "graphfsdp.clip_grad_norm_ in iteration, or FusedAdam(max_grad_norm=...)",
        ),
        "skip_nonfinite": (
            options.skip_nonfinite,
            "FusedAdam(skip_nonfinite=True), which does the same in every step",
        ),
        "scope='forward_backward'": (
            options.scope is Scope.FORWARD_BACKWARD,
            "loss_fn= in place of iteration=, whose loss has its optimizer step behind the graph; "
            "for any other iteration graphfsdp.capture_in_place, where every step runs as written",
        ),
    }
    for name, (is_given, remedy) in remedies.items():
        if is_given:
            raise ConfigError(
                f"iteration= does the whole iteration by itself, and cannot be combined with "
                f"{name}. Remedy: {remedy}"
            )
