"""`graphfsdp.capture`: checks the arguments and joins the packages into a captured step."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphfsdp._capture.compiled.inductor import require_compiler
from graphfsdp._capture.cpu.graph import CpuGraphBackend
from graphfsdp._capture.cuda.graph import CudaGraphBackend
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.step import CapturedStep, ExampleBatch
from graphfsdp._capture.trace.backend import GraphBackend
from graphfsdp._capture.undo.interrupts import DeferredInterrupts
from graphfsdp.config import CaptureOptions, Compile, MixedPrecisionPolicy, OnChange, Scope, Undo
from graphfsdp.errors import ConfigError, HazardKind
from graphfsdp.preconditions import (
    Noting,
    Program,
    Trained,
    as_list,
    raising,
    refuse_arguments,
    refuse_compiled_modules,
)

if TYPE_CHECKING:
    from graphfsdp.base.torch_internals import PipelineSchedule


def capture(
    model: "nn.Module | Sequence[nn.Module] | PipelineSchedule",
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    loss_fn: Callable[..., Any] | None = None,
    iteration: Callable[..., Any] | None = None,
    scope: str | Scope = "full_iteration",
    warmup_steps: int = 3,
    microbatches: int = 1,
    max_grad_norm: float | None = None,
    skip_nonfinite: bool = False,
    on_change: str | OnChange = "raise",
    max_graphs: int = 16,
    example_batch: object = None,
    verify: int = 0,
    audit: int | str = "auto",
    undo: str | Undo = "auto",
    backend: str = "auto",
    compile: bool | str = False,  # noqa: A002 (as torch has it)
    mp_policy: MixedPrecisionPolicy | None = None,
) -> CapturedStep:
    """Turn a model and its optimizer into a step that trains with one graph launch.

    Call it before the train loop. The first ``warmup_steps`` calls of the result train eagerly,
    the next one records the iteration (and trains too), every later call replays. After n calls
    the parameters are bit for bit those of n eager calls (``scope="none"``).

    From now on the step owns the gradients: every trainable parameter's ``.grad`` (or
    ``.decoupled_grad``) is a view of one persistent buffer, and ``zero_grad`` is not needed.

    Args:
        model: Any module, on one CPU or CUDA device; with ``iteration``, maybe a sequence. Or a
            schedule of ``torch.distributed.pipelining`` with this rank's stages: each call of the
            step is then one of ``schedule.step``, with the same arguments on all ranks, and
            returns the loss of the last stage on all of them (docs/pipelines.md).
        optimizer: FusedAdam, or one of ``torch.optim`` as it is: what it needs to be captured is
            turned on while it steps, and lr stays live; likewise.
        loss_fn: ``loss_fn(model, *args, **kwargs)`` returns the scalar loss, or ``(loss, aux)``
            with any nesting of tensors. Default: what the model returns, or its ``.loss``.
        iteration: Replaces the default iteration: ``iteration(model, optimizer, *args, **kwargs)``
            does forward, backward, ``zero_grad`` and step itself, as often as it likes, and
            returns tensors. It gets ``model`` and ``optimizer`` as they were given here, and
            begins without gradients. ``loss_fn`` is then for ``evaluate`` alone.
        scope: "full_iteration"; "forward_backward", which leaves any optimizer eager; or "none",
            the same code run eagerly, which is the reference.
        warmup_steps: Eager iterations before the capture, at least 1; each is a real training
            step on its batch.
        microbatches: Equal parts into which dim 0 of every tensor of the batch is split; their
            gradients are averaged, and one optimizer step follows.
        max_grad_norm: Clip the global gradient norm to this, on the device; ``inf`` only
            computes the norm.
        skip_nonfinite: Leave the optimizer step out, on the device, where a gradient is not
            finite; ``CapturedStep.skipped_steps`` counts.
        on_change: What to do with a batch that no graph was made for: "raise"; "recapture", a
            graph for each kind of batch, all in one memory pool; or "eager", run this call without
            a graph. A new kind runs eagerly once, and is captured when it comes again. Likewise
            for what graphs have baked in, such as an optimizer's momentum: "recapture" gives the
            graphs up and makes new ones, and warns of it.
        max_graphs: Graphs that are kept at a time; the least recently used one goes first.
        example_batch: Capture at once, on this: a tuple of arguments, a dict of keyword arguments,
            or one tensor, like the batches to come. Afterwards parameters, buffers, optimizer
            state and generators are as they were, bit for bit, so that made-up data will do. The
            first call replays; with other optimizers than graphfsdp's own it runs eagerly,
            since only their first step knows how their state begins.
        verify: Compare this many replays of each graph with an eager run from the same state, bit
            for bit; see ``CapturedStep.verify``.
        audit: "auto": after 1, 2, 4, ... 1,024 replays, and then after each 1,024, an iteration
            runs as written, which trains with the same bits, and what it does is compared with
            what was recorded; a difference is a GuardError. A number: after each so many; 0: never.
            The environment variable GRAPHFSDP_AUDIT says it for programs that leave this at "auto".
        undo: "auto": a warm-up or a capture that fails leaves no trace. For that copies of weights,
            gradients and optimizer state are kept while they run; on a GPU in memory of the host,
            as much as they take on the device. "none" keeps none: a warm-up that fails leaves the
            step broken (load a checkpoint, capture again), and Python alone as it was before.
        backend: "auto" takes the model's device; "cuda" and "cpu" insist on it.
        compile: On a CPU, compile the recording to C++ by Inductor: True, or "auto", which times
            each piece and keeps what is faster. Replays then equal eager within a bound, not bit
            for bit (docs/compile.md). On a GPU True has torch.compile make the model's kernels,
            which the graph then holds.
        mp_policy: Dtypes of main weights and main grads; default: as the optimizer keeps them.

    Returns:
        The step. Call it once per batch, ``close()`` it at the end.

    Raises:
        ConfigError: an argument, or a combination with the optimizer, cannot work.
        PrecisionError: the optimizer would read a casted copy of a gradient.
    """
    options = CaptureOptions(
        scope=Scope.parse(scope),
        warmup_steps=warmup_steps,
        microbatches=microbatches,
        max_grad_norm=max_grad_norm,
        skip_nonfinite=skip_nonfinite,
        on_change=OnChange.parse(on_change),
        max_graphs=max_graphs,
        verify=verify,
        audit=audit,
        undo=Undo.parse(undo),
        compile=Compile.parse(compile),
    )
    program = Program(model, optimizer, options, loss_fn, iteration, mp_policy)
    return captured_step(program, backend, example_batch)


def captured_step(program: Program, backend: str, example_batch: object) -> CapturedStep:
    """Return what ``capture`` does; a check of scripts has another function here."""
    refuse_arguments(program)
    with DeferredInterrupts():  # it hooks into parameters and modules
        engine = make_engine(program, backend=backend)
        return CapturedStep(engine, program.options, _arguments_of(example_batch))


def make_engine(program: Program, *, backend: str = "auto", noting: Noting = raising) -> Engine:
    """Refuse settings that cannot work, or note them; join what an iteration needs.

    ConfigError: they leave nothing to go on with.
    """
    trained, options = Trained(program, noting), program.options
    graph_backend = _make_backend(backend, trained.device, options.compile)
    if options.scope is not Scope.NONE:
        with noting(HazardKind.COMPILED):
            refuse_compiled_modules(trained.module, trained.device)
    on_gpu = trained.device.type == "cuda"
    if not on_gpu and options.compile is Compile.OFF:  # else torch fuses the whole
        trained.adapted.step_by_groups()
    compiles_models = on_gpu and options.compile is Compile.ON
    return Engine(
        trained.module,
        trained.adapted,
        graph_backend,
        find_params=trained.find_params,
        make_iteration=trained.make_iteration,
        policy=trained.policy,
        options=options,
        compiles=as_list(program.model, "model") if compiles_models else (),
    )


def _make_backend(name: str, device: torch.device, compiles: Compile) -> GraphBackend:
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"unknown backend {name!r}; expected 'auto', 'cuda' or 'cpu'")
    if name == "auto":
        name = device.type
    if name != device.type or name not in ("cuda", "cpu"):
        raise ConfigError(
            f"the {name!r} backend cannot capture a model on {device}; expected a model on one "
            f"'cuda' or 'cpu' device. Remedy: move the model, or leave backend='auto'"
        )
    if name == "cuda":
        if compiles is Compile.AUTO:
            raise ConfigError(
                "compile='auto' times pieces of a recording, which there are on a CPU alone. "
                "Remedy: compile=True, and compare with compile=False by graphfsdp bench"
            )
        return CudaGraphBackend(device)
    if compiles is not Compile.OFF:
        require_compiler()
    return CpuGraphBackend(device, compile=compiles)


def _arguments_of(example: object) -> ExampleBatch | None:
    if example is None:
        return None
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, list | tuple) else (example,)), {}
