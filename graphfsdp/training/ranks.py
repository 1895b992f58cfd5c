"""The processes that train together: which one this is, its device, their process group."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from graphfsdp.base.collectives import all_reduce_, broadcast_
from graphfsdp.checkpoint.members import Members
from graphfsdp.errors import ConfigError


@dataclass(frozen=True)
class Ranks(Members):
    """This process among those that train together, and among those of its machine.

    They have a group once they have joined each other in ``process_group``.
    """

    local_rank: int = 0
    local_size: int = 1
    launched: bool = False  # together, so there is a process group, also of one rank

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of every rank's value, as a new tensor; a collective."""
        value = value.detach().clone()
        if self.group is not None:
            all_reduce_(value, self.group, reduction="mean")
        return value

    def copy_first(self, model: nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0; a collective.

        One seed draws the same weights on equal machines alone: vector units round differently.
        """
        if self.group is not None:
            for tensor in model.state_dict().values():
                broadcast_(tensor, self.group)

    def refuse_differences(self, facts: Mapping[str, object]) -> None:
        """Check that all ranks are about to train the same thing: facts by names for messages."""
        first, *others = self.gather(dict(facts))
        for rank, theirs in enumerate(others, start=1):
            for name, value in first.items():
                if theirs[name] != value:
                    raise ConfigError(
                        f"rank {rank} has {name} {theirs[name]}, rank 0 has {value}; all ranks "
                        f"train one model on one corpus: start them with the same flags and data"
                    )


def find_ranks() -> Ranks:
    environment = os.environ
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in environment]
    if not missing:
        rank, size, local_rank = (int(environment[name]) for name in needed[:3])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
        return Ranks(None, rank, size, local_rank, local_size, launched=True)
    num_processes = environment.get("WORLD_SIZE", "1")
    if num_processes != "1":
        raise ConfigError(
            f"WORLD_SIZE is {num_processes}, but {', '.join(missing)} is not set, so "
            f"{num_processes} equal copies would be trained; start them with torchrun "
            f"--nproc-per-node {num_processes} -m graphfsdp train ..."
        )
    return Ranks()


class Gpu(NamedTuple):
    """Dense matrix arithmetic in TFLOP/s, and bytes/s of memory and of links where they are known.

    ``tf32`` is of float32 rounded to TF32; bfloat16 is summed in float32. A link's rate is to other
    GPUs, in one direction.
    """

    name: str  # a part of the device's own
    bf16: float
    tf32: float
    fp32: float
    memory_rate: float = math.nan
    link_rate: float = math.nan

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Return the peak for products of that dtype, as torch computes them now."""
        fp32 = self.fp32 if torch.get_float32_matmul_precision() == "highest" else self.tf32
        return 1e12 * (self.bf16 if dtype == torch.bfloat16 else fp32)


# The first whose name is a part of the device's name counts, so longer names come first.
# Source: NVIDIA's data sheets; halves of the figures given "with sparsity". H100 and H200: SXM,
# NVLink 900 GB/s in both directions together; DGX B200: 64 TB/s of eight, NVLink 1.8 TB/s.
GPUS = (
    Gpu("GB200", 2500.0, 1250.0, 80.0),
    Gpu("B200", 2250.0, 1100.0, 75.0, 8e12, 900e9),
    Gpu("H200", 989.0, 494.0, 67.0, 4.8e12, 450e9),
    Gpu("H100 PCIe", 756.0, 378.0, 51.0),
    Gpu("H100 NVL", 835.0, 417.0, 60.0),
    Gpu("H100", 989.0, 494.0, 67.0, 3.35e12, 450e9),
    Gpu("A100", 312.0, 156.0, 19.5),
    Gpu("L40S", 362.0, 183.0, 91.6),
    Gpu("L4", 121.0, 60.0, 30.3),
    Gpu("RTX 4090", 165.2, 82.6, 82.6),
)


def find_gpu(device_name: str) -> Gpu | None:
    return next((gpu for gpu in GPUS if gpu.name in device_name), None)


def choose_device(choice: str, ranks: Ranks) -> torch.device:
    """With several ranks on a machine, one GPU each."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu, or "
            f"install a driver and a build of torch for CUDA"
        )
    if choice == "cpu" or not available:
        return torch.device("cpu")
    if not ranks.launched:
        return torch.device("cuda", torch.cuda.current_device())
    num_gpus = torch.cuda.device_count()
    if ranks.local_size > num_gpus:
        raise ConfigError(
            f"{ranks.local_size} processes were started on this machine, but torch finds "
            f"{num_gpus} GPU(s), and each process needs its own; give torchrun --nproc-per-node "
            f"{num_gpus}, or --device cpu"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


@contextmanager
def process_group(ranks: Ranks, device: torch.device, *, timeout_minutes: int) -> Iterator[Ranks]:
    """Join the other processes, if a launcher has started any, while the body runs.

    Whatever holds a captured graph must be closed inside: it holds the group's communicators.
    """
    if not ranks.launched:
        yield ranks
        return
    timeout = timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        backend_for(device),
        timeout=timeout,
        store=_store_of_this_attempt(ranks, timeout),
        rank=ranks.rank,
        world_size=ranks.size,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield replace(ranks, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    # Python objects travel through gloo, which does not disturb a stream that is recorded.
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _store_of_this_attempt(ranks: Ranks, timeout: timedelta) -> Store | None:
    """Return a part of the launcher's store in which a restarted run finds nothing old.

    torchrun keeps one store over all restarts, and ranks could read addresses of processes that
    were killed (pytorch/pytorch#135712). Agents of several machines count restarts each for
    itself; there the launcher has to be told to make a new store (docs/scale.md).
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shared or attempt == "0" or ranks.local_size != ranks.size:
        return None
    store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))
    return PrefixStore(f"attempt_{attempt}", store)
