"""``graphfsdp plan``: what a training run will need, as a table or as JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from rich.table import Table

from graphfsdp.command_line import Parser, add_flags, print_line, require
from graphfsdp.planning.plan import Collective, TrainingPlan, plan_training
from graphfsdp.planning.roofline import DEVICES, Bound, DeviceName
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.config import StrategyName

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class _Options:
    """Each field is a flag (``command_line.add_flags``)."""

    world_size: Annotated[int, "number of ranks"] = 8
    strategy: Annotated[StrategyName | None, "short for --data-parallel-sharding-strategy"] = None
    device: Annotated[DeviceName | None, "the least time of an iteration on such GPUs"] = None
    json: Annotated[bool, "print JSON instead of tables", "store_true"] = False

    def __post_init__(self) -> None:
        require("world_size", self.world_size, self.world_size >= 1, "at least 1")


def run_plan(arguments: Sequence[str], console: Console) -> None:
    parsed, others = _make_parser().parse_known_args(arguments)
    options = _Options(**vars(parsed))
    if options.strategy is not None:
        others += ["--data-parallel-sharding-strategy", options.strategy]
    config = parse_train_arguments(others)
    plan = plan_training(config, num_ranks=options.world_size)
    bound = None if options.device is None else plan.bound(DEVICES[options.device])
    if options.json:
        found = {} if bound is None else {"bound_s": bound._asdict(), "device": options.device}
        console.print_json(json.dumps(plan.to_dict() | found))
        return
    for table in (_memory_table(plan), _collective_table(plan)):
        console.print(table)
    for line in _summary(plan):
        print_line(console, line)
    if bound is not None:
        print_line(console, _least(bound, plan))


def _make_parser() -> Parser:
    parser = Parser(
        prog="graphfsdp plan",
        description="Tell what each rank of a training run will need, on any machine: memory by "
        "kind, padding, and what goes over each link in an iteration.",
        epilog="Every flag of 'graphfsdp train' describes the run: --preset, --bf16, "
        "--micro-batch-size, --global-batch-size, --seq-length, ...",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add_flags(parser, _Options, {})
    return parser


def _memory_table(plan: TrainingPlan) -> Table:
    config = plan.config
    table = Table(
        title=f"{config.preset}: memory of each of {plan.batch.num_ranks} ranks, "
        f"{config.sharding.value}{_axes(plan)}",
        title_justify="left",
    )
    for name in ("kind", "bytes", ""):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    table.add_column("how it comes about", style="dim")
    for line in plan.memory:
        about = "~ " if not line.exact else ""
        exact = f"{line.num_bytes:,}" if line.exact else ""
        table.add_row(line.kind, exact, about + _readable(line.num_bytes), line.note)
    table.add_section()
    table.add_row("together", "", f"~ {_readable(plan.total_bytes)}", "", style="bold")
    return table


def _collective_table(plan: TrainingPlan) -> Table:
    table = Table(title="collectives of one iteration", title_justify="left")
    for name in ("operation", "units", "calls", "bytes of a call", "a rank sends"):
        table.add_column(name, justify="left" if name in ("operation", "units") else "right")
    for calls in _equal_ones(plan.collectives):
        first = calls[0]
        units = first.unit if len(calls) == 1 else f"{first.unit} ... {calls[-1].unit}"
        table.add_row(
            first.op,
            units,
            f"{sum(call.count for call in calls)}",
            f"{first.buffer_bytes:,}",
            _readable(sum(call.wire_bytes for call in calls)),
        )
    return table


def _equal_ones(calls: Sequence[Collective]) -> list[list[Collective]]:
    groups: dict[tuple[str, int, int], list[Collective]] = {}
    for call in calls:
        groups.setdefault((call.op, call.buffer_bytes, call.count), []).append(call)
    return list(groups.values())


def _summary(plan: TrainingPlan) -> list[str]:
    padding = 100 * plan.num_padding / max(plan.num_parameters, 1)
    return [
        f"{plan.num_parameters:,} parameters in {len(plan.units)} units, "
        f"{plan.num_padding:,} elements of padding on all ranks ({padding:.3f} %)",
        f"{plan.batch.num_tokens:,} tokens in an iteration, {plan.batch.num_microbatches} "
        f"micro-batches on each rank, {plan.flops / 1e12:,.3g} TFLOP of arithmetic",
        "~ marks estimates; everything else is what the layout decides, to the byte",
    ]


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


def _axes(plan: TrainingPlan) -> str:
    axes = plan.axes
    if axes.outer == 1:
        return ""
    state = ", optimizer state cut over these too" if axes.cuts_outside else ""
    return f" over {axes.inner}, {axes.outer} times{state}"


def _readable(num_bytes: int) -> str:
    size, unit = float(num_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:,.2f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
