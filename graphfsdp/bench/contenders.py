"""The list of contenders."""

from collections.abc import Callable

from graphfsdp.bench import torch_contenders
from graphfsdp.bench.contender import Contender, ContenderSpec, Setting
from graphfsdp.bench.megatron_contender import megatron_fsdp
from graphfsdp.bench.own_contenders import OwnContender
from graphfsdp.bench.records import REFERENCE
from graphfsdp.config import Scope
from graphfsdp.errors import ConfigError


def _own(scope: Scope, *, compiled: bool = False) -> Callable[[Setting], Contender]:
    return lambda setting: OwnContender(setting, scope, compiled=compiled)


CONTENDERS = (
    ContenderSpec(
        REFERENCE,
        "graphfsdp with scope none: the captured code, run eagerly, with FusedAdam; the reference",
        _own(Scope.NONE),
    ),
    ContenderSpec(
        "pytorch",
        "a plain PyTorch loop: AdamW(fused=True), clip_grad_norm_; bf16 by autocast; "
        "DistributedDataParallel on several ranks",
        torch_contenders.plain,
    ),
    ContenderSpec(
        "compile",
        "the plain loop around torch.compile(model)",
        torch_contenders.compiled,
        compiles=True,
    ),
    ContenderSpec(
        "reduce_overhead",
        'the plain loop around torch.compile(model, mode="reduce-overhead")',
        torch_contenders.reduce_overhead,
        compiles=True,
    ),
    ContenderSpec(
        "fsdp2",
        "PyTorch's FSDP2 (fully_shard on each block and the root), AdamW(fused=True)",
        torch_contenders.fsdp2,
        needs_group=True,
    ),
    ContenderSpec(
        "fsdp2_compile",
        "the same with each block compiled by torch.compile",
        torch_contenders.fsdp2_compiled,
        needs_group=True,
        compiles=True,
    ),
    ContenderSpec(
        "megatron_fsdp",
        "Megatron-FSDP's ZeRO-3 (PyPI megatron-fsdp), AdamW(fused=True)",
        megatron_fsdp,
        needs_group=True,
    ),
    ContenderSpec(
        "forward_backward",
        "graphfsdp with forward and backward in the graph, FusedAdam eager",
        _own(Scope.FORWARD_BACKWARD),
    ),
    ContenderSpec(
        "full_iteration",
        "graphfsdp with the whole iteration in one graph",
        _own(Scope.FULL_ITERATION),
    ),
    ContenderSpec(
        "compile_full_iteration",
        "graphfsdp with the whole iteration of torch.compile(model) in one graph",
        _own(Scope.FULL_ITERATION, compiled=True),
        compiles=True,
    ),
)


def find_contenders(names: tuple[str, ...] | None) -> tuple[ContenderSpec, ...]:
    """Return the contenders of these names, the reference always first; None is all.

    Raises:
        ConfigError: there is no contender of some name.
    """
    known = {spec.name: spec for spec in CONTENDERS}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"there is no contender {name!r}; expected some of {', '.join(known)}"
            )
    wanted = {REFERENCE, *(known if names is None else names)}
    return tuple(spec for spec in CONTENDERS if spec.name in wanted)
