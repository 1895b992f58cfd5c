"""Which cases a run measures: named suites, or what the flags ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

from graphfsdp.bench.workloads import Case, DtypeName, find_workload
from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class PlannedCase:
    """A case, and how it is measured.

    Attributes:
        contenders: Their names; None is all of them.
        memory: On a CPU, also run each contender in a process of its own for its peak memory.
    """

    case: Case
    contenders: tuple[str, ...] | None = None
    memory: bool = True


def plan_cases(
    workloads: Sequence[str],
    batch_sizes: Sequence[int] | None,
    dtypes: Sequence[DtypeName],
    contenders: tuple[str, ...] | None,
    *,
    memory: bool,
) -> tuple[PlannedCase, ...]:
    """Return the product of workloads, precisions and batch sizes.

    Args:
        workloads: Names.
        batch_sizes: For each workload; None is the workload's own.
        dtypes: "fp32", "bf16".
        contenders: Their names; None is all of them.
        memory: See ``PlannedCase``.

    Raises:
        ConfigError: there is no such workload.
    """
    found = [find_workload(name) for name in dict.fromkeys(workloads)]
    return tuple(
        PlannedCase(Case(workload, dtype, size), contenders, memory)
        for workload in found
        for dtype in dict.fromkeys(dtypes)
        for size in dict.fromkeys(batch_sizes or [workload.batch_size])
    )


# On a CPU torch.compile uses no CUDA graphs, so that one case shows what its mode for them does.
_CPU_CONTENDERS = (
    *("eager", "pytorch", "compile", "fsdp2", "fsdp2_compile", "megatron_fsdp"),
    *("forward_backward", "full_iteration", "compile_full_iteration"),
)
# What tells most in few minutes; the first cases have all of them.
_GPU_CONTENDERS = (
    *("eager", "pytorch", "compile", "fsdp2"),
    *("forward_backward", "full_iteration", "compile_full_iteration"),
)


def suite(name: str) -> tuple[PlannedCase, ...]:
    """Return the cases of a suite, the most telling ones first.

    Raises:
        ConfigError: there is none of that name.
    """
    made = {
        "cpu": (
            _planned("gpt-tiny", "fp32", 4, None, memory=True),
            _planned("gpt-3m", "fp32", 8, _CPU_CONTENDERS, memory=True),
            _planned("gpt-tiny", "fp32", 64, _CPU_CONTENDERS),
            _planned("llama-tiny", "bf16", 4, _CPU_CONTENDERS),
            _planned("moe-tiny", "fp32", 4, _CPU_CONTENDERS),
            _planned("bert-tiny", "fp32", 4, _CPU_CONTENDERS),
            _planned("conv-tiny", "fp32", 8, _CPU_CONTENDERS),
            _planned("gpt-tiny", "fp32", 1, _CPU_CONTENDERS),
            _planned("gpt-tiny", "fp32", 16, _CPU_CONTENDERS),
        ),
        "gpu": (
            _planned("gpt-tiny", "fp32", 4, None),
            _planned("gpt2-124m", "bf16", 8, None),
            _planned("gpt2-124m", "bf16", 1, _GPU_CONTENDERS),
            _planned("llama-160m", "bf16", 2, _GPU_CONTENDERS),
            _planned("moe-180m", "bf16", 4, _GPU_CONTENDERS),
            _planned("bert-base", "bf16", 8, _GPU_CONTENDERS),
            _planned("conv-small", "fp32", 64, _GPU_CONTENDERS),
            _planned("gpt2-124m", "bf16", 32, _GPU_CONTENDERS),
        ),
        "quick": (_planned("gpt-tiny", "fp32", 4, ("eager", "pytorch", "full_iteration")),),
    }
    if name not in made:
        raise ConfigError(f"there is no suite {name!r}; expected one of {', '.join(made)}")
    return made[name]


SUITES = ("cpu", "gpu", "quick")


def _planned(
    name: str,
    dtype: DtypeName,
    batch_size: int,
    contenders: tuple[str, ...] | None,
    *,
    memory: bool = False,
) -> PlannedCase:
    return PlannedCase(Case(find_workload(name), dtype, batch_size), contenders, memory)
