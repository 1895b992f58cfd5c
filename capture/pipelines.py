"""Iterations of torch's pipeline schedules: every stage of this rank, as one iteration."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.iteration import Iteration, clear_autocast_cache, own
from graphfsdp._capture.rules.looks import without_looks
from graphfsdp._capture.undo.interrupts import interruptible
from graphfsdp.base.collectives import broadcast_
from graphfsdp.base.protocols import CapturableOptimizer, pipeline_stages
from graphfsdp.base.streams import nvtx_range
from graphfsdp.base.torch_internals import tree_flatten, tree_map
from graphfsdp.errors import ConfigError

_TARGET = "target"
_FORWARD = ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")


class Pipeline:
    """A schedule of torch with the stages of this rank, each of them used through copies.

    Note [Copies of a schedule]: torch's stages keep buffers to receive into, of the shapes of the
    first batch, and other ones for evaluation than for training; they find out shapes, and make the
    buffers, in the first step of each kind, for which ranks send each other Python objects. So each
    kind of step has a copy of the schedule, whose first step comes before any warm-up that is
    watched; and nothing that is done to the user's own schedule matters to a graph.

    Attributes:
        module: This rank's stages.
        stages: Likewise, as torch has them.
        group: The ranks of the pipeline.
        loss_fn: As the schedule has it.
        averages: The schedule divides gradients by the number of microbatches.
        name: Of the schedule's class.
    """

    def __init__(self, schedule: Any) -> None:
        """ConfigError: it has no loss, or cannot be copied stage by stage."""
        self.stages: list[Any] = pipeline_stages(schedule)
        if schedule._loss_fn is None:
            raise ConfigError(
                f"the {type(schedule).__name__} has no loss_fn, so there is nothing to train on. "
                "Remedy: give it one, on every rank: loss_fn(output, target)"
            )
        modules = [stage.submod for stage in self.stages]
        self.module: nn.Module = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        group = self.stages[0].group or dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.loss_fn: Callable[..., Any] = schedule._loss_fn
        self.num_microbatches = int(schedule._n_microbatches)
        self.averages = bool(schedule.scale_grads)
        self.name = type(schedule).__name__
        self._schedule = schedule
        self._copies: dict[object, Any] = {}

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs (zero bubble)."""
        order = getattr(self._schedule, "pipeline_order", None) or {}
        kinds = {
            action.computation_type.name for each in order.values() for action in each if action
        }
        return "BACKWARD_WEIGHT" in kinds or "OVERLAP_F_B" in kinds

    def schedule_for(self, inputs: StaticInputs, *, trains: bool) -> Any:
        """Return the copy for steps of such a kind with such a batch, ready to run."""
        args, kwargs, target = self._parts(inputs)
        if trains and target is None:
            raise ConfigError(
                f"the {self.name} was called without a target. Remedy: step(*inputs, "
                "target=targets), on all ranks of the pipeline"
            )
        self._check_rows(args, target)
        leaves, spec = tree_flatten((args, kwargs, target))
        kinds = [(each.shape, each.dtype) if isinstance(each, Tensor) else each for each in leaves]
        key = (trains, str(spec), str(kinds))
        if key not in self._copies:
            self._copies[key] = self._ready(args, kwargs, target, trains=trains)
        return self._copies[key]

    def run(self, inputs: StaticInputs, *, trains: bool) -> Any:
        """Run the whole schedule; return the loss, or without a target what the last stage does.

        [] float32, or float64 if weights are; the same on all ranks.
        """
        args, kwargs, target = self._parts(inputs)
        schedule = self.schedule_for(inputs, trains=trains)
        losses: list[Tensor] = []
        with _as_before(pipeline_stages(schedule)), _as_it_was(), interruptible():
            output = schedule.step(
                *(args if self._has(0) else ()),
                target=target if self._has(-1) else None,
                losses=losses if target is not None else None,
                return_outputs=target is None,
                **kwargs,
            )
        return output if target is None else self._loss_on_all_ranks(losses)

    def _ready(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, *, trains: bool
    ) -> Any:
        """Have torch find out shapes and make the buffers."""
        made = _shallow(self._schedule)
        made._has_backward = trains
        made.scale_grads = False  # the persistent gradients are, wherever they are bound
        if target is None:
            made._loss_fn = None
            made._should_compute_loss = lambda stage: False
        stages = [_shallow(stage) for stage in self.stages]
        for stage in stages:
            stage.has_backward, stage.grad_send_info = trains, None
        order = getattr(made, "pipeline_order_with_comms", None)
        if order is not None and not trains:  # torch cannot evaluate all of its schedules
            order = {rank: list(_forward_alone(actions)) for rank, actions in order.items()}
            made.pipeline_order_with_comms = order
        single = hasattr(made, "_stage")
        vars(made).update({"_stage": stages[0]} if single else {"_stages": stages})
        for name in vars(made):
            if name.endswith(("_forward_initialized", "_backward_initialized")):
                setattr(made, name, False)
        some_args, some_kwargs = made._split_inputs(args if self._has(0) else (), kwargs)
        some_targets = () if target is None else target.tensor_split(self.num_microbatches)
        initialize = made._initialize_stage if single else made._initialize_stages
        # torch 2.11 asks for no target.
        takes_target = _TARGET in inspect.signature(initialize).parameters
        # torch 2.13 runs the stages for it, on numbers that nobody has written.
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        with _as_it_was():
            initialize(some_args[0], some_kwargs[0], *(some_targets[:1] if takes_target else ()))
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return made

    def _parts(self, inputs: StaticInputs) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        args, given = inputs.hand_out()
        kwargs = dict(given)
        target = kwargs.pop(_TARGET, None)
        return args, kwargs, target

    def _check_rows(self, args: tuple[Any, ...], target: Any) -> None:
        """ConfigError if microbatches would differ: stages receive into buffers of one shape."""
        given = args if self._schedule._args_chunk_spec is None else ()
        for leaf in (*given, target):
            rows = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0
            if rows % self.num_microbatches:
                raise ConfigError(
                    f"a batch of {rows} rows cannot be split into {self.num_microbatches} equal "
                    f"microbatches, as the {self.name} does. Remedy: a batch whose rows are a "
                    "multiple of n_microbatches (drop_last=True)"
                )

    def _has(self, index: int) -> bool:
        """Tell whether this rank has the first (0) or the last stage (-1)."""
        wanted = index % self.stages[0].num_stages
        return any(stage.stage_index == wanted for stage in self.stages)

    def _loss_on_all_ranks(self, losses: Sequence[Tensor]) -> Tensor:
        param = next(self.module.parameters())
        # In float64 every loss is what it was; ranks need not know each other's dtypes.
        shared = torch.zeros((), dtype=torch.float64, device=param.device)
        if losses:
            stacked = torch.stack([loss.detach() for loss in losses])
            shared = (stacked.mean() if self.averages else stacked.sum()).double()
        last = self.stages[0].num_stages - 1
        broadcast_(shared, self.group, source=self.stages[0].stage_index_to_group_rank[last])
        return shared.to(torch.promote_types(param.dtype, torch.float32))


class PipelineIteration(Iteration):
    """A whole schedule, the norm over all stages, clip and step."""

    _binds_at_once = True

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: CapturableOptimizer,
        gradients: PersistentGradients,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
    ) -> None:
        super().__init__(
            pipeline.module,
            optimizer,
            gradients,
            loss_fn=pipeline.loss_fn,
            groups=(pipeline.group,),
            max_grad_norm=max_grad_norm,
            skip_nonfinite=skip_nonfinite,
        )
        self._pipeline = pipeline
        self.schedule = f"{pipeline.name} of {pipeline.num_microbatches} microbatches"

    def prepare(self, inputs: StaticInputs, *, trains: bool) -> None:
        self._pipeline.schedule_for(inputs, trains=trains)

    def forward_backward(self, inputs: StaticInputs) -> Any:
        """Return the mean loss over the microbatches, or their sum (``scale_grads=False``).

        Capture: no host sync; gradients land in the persistent buffers.
        """
        loss = super().forward_backward(inputs)
        if self._pipeline.averages and self._pipeline.num_microbatches > 1:
            landed = self._gradients.landed_views()
            views = [view for views in landed.values() for view in views]
            if views:
                torch._foreach_div_(views, self._pipeline.num_microbatches)
        return loss

    def _run(self, inputs: StaticInputs) -> Any:
        for root in self._roots:
            root.set_is_last_microbatch(False)
        with nvtx_range("pipeline"):
            loss = self._pipeline.run(inputs, trains=True)
        for root in self._roots:
            root.set_is_last_microbatch(True)
            root.finish_microbatches()
        return loss

    def forward(self, inputs: StaticInputs) -> Any:
        """Return the loss, or, where the batch has no target, the outputs on the last rank."""
        with torch.no_grad(), nvtx_range("forward"), without_looks():
            clear_autocast_cache()
            return tree_map(own, self._pipeline.run(inputs, trains=False))


def pipeline_of(model: object) -> Pipeline | None:
    """Return the pipeline of a schedule of torch; None for anything else."""
    return Pipeline(model) if pipeline_stages(model) else None


def _forward_alone(actions: Iterable[Any]) -> Iterator[Any]:
    for action in actions:
        if action.sub_actions is not None:
            yield from _forward_alone(action.sub_actions)
        elif action.computation_type.name in _FORWARD:
            yield action


def _shallow(value: Any) -> Any:
    """Return a copy that shares all but its containers and what torch notes of a stage."""
    made = copy.copy(value)
    for name, item in vars(made).items():
        if isinstance(item, dict | list | set) or name == "_stage_meta":
            setattr(made, name, copy.copy(item))
    return made


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Raise what a stage has failed of, in place of torch's list of its arguments."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None or "failed to run" not in str(error).lower():
            raise
        cause.add_note(" ".join(str(error).split()))
        raise cause from None


@contextmanager
def _as_before(stages: Sequence[Any]) -> Iterator[None]:
    """Let go of what stages keep of an iteration, so that it need not outlive a replay."""

    def received() -> Iterator[Any]:
        for stage in stages:
            for table in (stage.args_recv_info, stage.grad_recv_info):
                yield from (info for infos in table.values() for info in infos)

    # A stage whose neighbour is on the same rank is handed its tensors in place of a buffer.
    buffers = [(info, info.buffer) for info in received() if hasattr(info, "buffer")]
    try:
        yield
    finally:
        for info, buffer in buffers:
            info.buffer = buffer
        for stage in stages:
            stage.clear_runtime_states()
            stage.bwd_cache.clear()
