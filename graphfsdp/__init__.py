"""graphfsdp: train with the whole iteration in one CUDA graph."""

from typing import TYPE_CHECKING, Any

from graphfsdp import newer_torch as newer_torch  # first: it warns
from graphfsdp._capture.report.report import CaptureReport as CaptureReport
from graphfsdp._capture.runner import Phase as Phase
from graphfsdp._capture.step import CapturedStep as CapturedStep
from graphfsdp.api import capture as capture
from graphfsdp.base.norms import clip_grad_norm_ as clip_grad_norm_
from graphfsdp.base.recomputation import recompute as recompute
from graphfsdp.base.recomputation import recompute_contexts as recompute_contexts
from graphfsdp.config import MixedPrecisionPolicy as MixedPrecisionPolicy
from graphfsdp.config import Scope as Scope
from graphfsdp.config import ShardingStrategy as ShardingStrategy
from graphfsdp.errors import BatchMismatchError as BatchMismatchError
from graphfsdp.errors import CaptureError as CaptureError
from graphfsdp.errors import ChangeKind as ChangeKind
from graphfsdp.errors import CheckpointDamagedError as CheckpointDamagedError
from graphfsdp.errors import CheckpointError as CheckpointError
from graphfsdp.errors import CheckpointMismatchError as CheckpointMismatchError
from graphfsdp.errors import ConfigError as ConfigError
from graphfsdp.errors import GraphFSDPError as GraphFSDPError
from graphfsdp.errors import GuardError as GuardError
from graphfsdp.errors import Hazard as Hazard
from graphfsdp.errors import HazardKind as HazardKind
from graphfsdp.errors import InvalidLossError as InvalidLossError
from graphfsdp.errors import NotCopyableError as NotCopyableError
from graphfsdp.errors import PhaseError as PhaseError
from graphfsdp.errors import PrecisionError as PrecisionError
from graphfsdp.errors import RankFailedError as RankFailedError
from graphfsdp.errors import VerificationError as VerificationError
from graphfsdp.in_place import capture_in_place as capture_in_place
from graphfsdp.preflight.check import check as check
from graphfsdp.preflight.report import CheckReport as CheckReport

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
    from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy

    from graphfsdp.checkpoint import AsyncSaver as AsyncSaver
    from graphfsdp.checkpoint import load as load
    from graphfsdp.checkpoint import save as save
    from graphfsdp.sharding.fully_shard import fully_shard as fully_shard
    from graphfsdp.sharding.materialize import materialize as materialize
    from graphfsdp.sharding.module import FSDPModule as FSDPModule
    from graphfsdp.sharding.module import GradientReductionHandle as GradientReductionHandle
    from graphfsdp.sharding.module import UnshardHandle as UnshardHandle
    from graphfsdp.sharding.pipelines import (
        register_fsdp_forward_method as register_fsdp_forward_method,
    )
    from graphfsdp.sharding.pipelines import share_comm_ctx as share_comm_ctx

__version__ = "0.2.0"

__all__ = [
    "AsyncSaver",
    "BatchMismatchError",
    "CPUOffloadPolicy",
    "CaptureError",
    "CaptureReport",
    "CapturedStep",
    "ChangeKind",
    "CheckReport",
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointMismatchError",
    "ConfigError",
    "FSDPModule",
    "GradientReductionHandle",
    "GraphFSDPError",
    "GuardError",
    "Hazard",
    "HazardKind",
    "InvalidLossError",
    "MixedPrecisionPolicy",
    "NotCopyableError",
    "OffloadPolicy",
    "Phase",
    "PhaseError",
    "PrecisionError",
    "RankFailedError",
    "Scope",
    "ShardingStrategy",
    "UnshardHandle",
    "VerificationError",
    "capture",
    "capture_in_place",
    "check",
    "clip_grad_norm_",
    "fully_shard",
    "load",
    "materialize",
    "recompute",
    "recompute_contexts",
    "register_fsdp_forward_method",
    "save",
    "share_comm_ctx",
]
# Of FSDP2, from where they are together.
_WORDS = (
    *("CPUOffloadPolicy", "FSDPModule", "GradientReductionHandle", "OffloadPolicy"),
    *("UnshardHandle", "fully_shard"),
    *("register_fsdp_forward_method", "share_comm_ctx"),
)


def __getattr__(name: str) -> Any:
    # DTensor takes about a second to import, which a run on one rank need not wait for.
    if name in _WORDS:
        from graphfsdp.sharding import fully_shard as module

        return getattr(module, name)
    if name == "materialize":
        from graphfsdp.sharding.materialize import materialize

        return materialize
    if name in ("AsyncSaver", "load", "save"):
        from graphfsdp import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'graphfsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", "optim"]
