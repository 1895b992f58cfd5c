"""``graphfsdp plan``: what a training run will need, in lines."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console

from graphfsdp.command_line import Parser, add_flags, print_line, require
from graphfsdp.planning.plan import DEVICES, DeviceName, TrainingPlan, plan_training
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.config import StrategyName


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``command_line.add_flags``)."""

    world_size: Annotated[int, "number of ranks"] = 8
    strategy: Annotated[StrategyName | None, "short for --data-parallel-sharding-strategy"] = None
    device: Annotated[DeviceName | None, "the least time of an iteration on such GPUs"] = None

    def __post_init__(self) -> None:
        require("world_size", self.world_size, self.world_size >= 1, "at least 1")


def run_plan(arguments: Sequence[str], console: Console) -> None:
    parser = Parser(
        prog="graphfsdp plan",
        description="Tell what each rank of a training run will need, on any machine: memory by "
        "kind,\npadding, and what goes over each link in an iteration.",
        epilog="Every flag of 'graphfsdp train' describes the run: --preset, --bf16, "
        "--micro-batch-size,\n--global-batch-size, --seq-length, ...",
    )
    add_flags(parser, _Options, {})
    parsed, others = parser.parse_known_args(arguments)
    options = _Options(**vars(parsed))
    if options.strategy is not None:
        others += ["--data-parallel-sharding-strategy", options.strategy]
    plan = plan_training(parse_train_arguments(others), num_ranks=options.world_size)
    for line in _lines(plan, options.device):
        print_line(console, line)


def _lines(plan: TrainingPlan, device: DeviceName | None) -> Iterator[str]:
    config, axes = plan.config, plan.axes
    over = f" over {axes.inner} ranks, {axes.outer} times" if axes.outer > 1 else ""
    over += ", optimizer state cut over all" if axes.cuts_outside else ""
    yield f"{config.preset} on {plan.batch.num_ranks} ranks, {config.sharding.value}{over}"
    yield "memory of each rank (~ marks estimates; all else the layout decides, to the byte):"
    for kind, num_bytes, exact in (*plan.memory, ("together", plan.total_bytes, False)):
        yield _row("" if exact else "~", num_bytes, kind)
    yield "a rank sends in one iteration:"
    for op in dict.fromkeys(call.op for call in plan.collectives):
        calls = [call for call in plan.collectives if call.op == op]
        count = sum(call.num_calls for call in calls)
        yield _row("", sum(call.wire_bytes for call in calls), f"{op}, {count:,} times")
    padding = 100 * plan.num_padding / max(plan.num_parameters, 1)
    yield (
        f"{plan.num_parameters:,} parameters in {len(plan.units)} units, "
        f"{plan.num_padding:,} elements of padding on all ranks ({padding:.3f} %)"
    )
    yield (
        f"{plan.batch.num_tokens:,} tokens in an iteration, {plan.batch.num_microbatches} "
        f"micro-batches on each rank, {plan.flops / 1e12:,.3g} TFLOP of arithmetic"
    )
    if device is not None:
        bound = plan.bound(DEVICES[device])
        written, captured, *shares = (
            f"{1e3 * seconds:,.3g} ms" for seconds in (max(bound), bound.captured, *bound)
        )
        yield (
            f"an iteration takes at least {written} as it is written, {captured} captured (bound, "
            "not measured): arithmetic {}, memory {}, links {}, the host's {:,} launches or more {}"
        ).format(*shares[:3], plan.num_kernels, shares[3])


def _row(mark: str, num_bytes: int, what: str) -> str:
    return f"  {mark:1}{num_bytes / 2**20:>13,.2f} MiB  {what}"
