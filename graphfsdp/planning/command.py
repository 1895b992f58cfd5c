"""``graphfsdp plan``: what a training run will need, as lines or as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console

from graphfsdp.command_line import Parser, add_flags, print_line, require
from graphfsdp.planning.plan import (
    DEVICES,
    Bound,
    Collective,
    DeviceName,
    TrainingPlan,
    plan_training,
)
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.config import StrategyName


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``command_line.add_flags``)."""

    world_size: Annotated[int, "number of ranks"] = 8
    strategy: Annotated[StrategyName | None, "short for --data-parallel-sharding-strategy"] = None
    device: Annotated[DeviceName | None, "the least time of an iteration on such GPUs"] = None
    json: Annotated[bool, "print JSON instead of lines", "store_true"] = False

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
    bound = None if options.device is None else plan.bound(DEVICES[options.device])
    if options.json:
        found = {} if bound is None else {"bound_s": bound._asdict(), "device": options.device}
        console.print_json(json.dumps(plan.to_dict() | found))
        return
    for line in _lines(plan):
        print_line(console, line)
    if bound is not None:
        print_line(console, _least(bound, plan))


def _lines(plan: TrainingPlan) -> Iterator[str]:
    config, axes = plan.config, plan.axes
    over = f" over {axes.inner} ranks, {axes.outer} times" if axes.outer > 1 else ""
    over += ", optimizer state cut over all" if axes.cuts_outside else ""
    yield f"{config.preset} on {plan.batch.num_ranks} ranks, {config.sharding.value}{over}"
    yield "memory of each rank (~ marks estimates; all else the layout decides, to the byte):"
    for kind, num_bytes, exact in plan.memory:
        yield _row(kind, "" if exact else "~", num_bytes)
    yield _row("together", "~", plan.total_bytes)
    yield "a rank sends in one iteration:"
    for calls in _equal_ones(plan.collectives):
        first, last, count = calls[0], calls[-1], sum(call.count for call in calls)
        units = first.unit if first.unit == last.unit else f"{first.unit} ... {last.unit}"
        what = f"{first.op} of {units}, {count} x {first.buffer_bytes:,} B"
        yield _row(what, "", sum(call.wire_bytes for call in calls))
    padding = 100 * plan.num_padding / max(plan.num_parameters, 1)
    yield (
        f"{plan.num_parameters:,} parameters in {len(plan.units)} units, "
        f"{plan.num_padding:,} elements of padding on all ranks ({padding:.3f} %)"
    )
    yield (
        f"{plan.batch.num_tokens:,} tokens in an iteration, {plan.batch.num_microbatches} "
        f"micro-batches on each rank, {plan.flops / 1e12:,.3g} TFLOP of arithmetic"
    )


def _row(what: str, mark: str, num_bytes: int) -> str:
    return f"  {mark:1}{num_bytes / 2**20:>13,.2f} MiB  {what}"


def _equal_ones(calls: Sequence[Collective]) -> list[list[Collective]]:
    groups: dict[tuple[str, int, int], list[Collective]] = {}
    for call in calls:
        groups.setdefault((call.op, call.buffer_bytes, call.count), []).append(call)
    return list(groups.values())


def _least(bound: Bound, plan: TrainingPlan) -> str:
    shares = "arithmetic {}, memory {}, links {}, the host's {} launches or more {}".format(
        *map(_ms, bound[:3]), f"{plan.num_kernels:,}", _ms(bound.host)
    )
    return (
        f"an iteration takes at least {_ms(max(bound))} as it is written, {_ms(bound.captured)} "
        f"captured (bound, not measured): {shares}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3g} ms"
