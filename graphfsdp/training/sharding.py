"""The trainer's model cut over the ranks, and put together again for a file."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphfsdp
from graphfsdp.base.dtensors import is_dtensor
from graphfsdp.config import MixedPrecisionPolicy, ShardingStrategy
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.module import unit_of
from graphfsdp.training.gpt import GPT


def shard_model(
    model: GPT,
    strategy: ShardingStrategy,
    policy: MixedPrecisionPolicy,
    *,
    num_instances: int = 1,
    outer_strategy: str = "no_shard",
) -> None:
    """Make a unit of each block and one of the rest, which holds tied embeddings too.

    Args:
        model: The model.
        strategy: What is cut.
        policy: Dtypes of the copies.
        num_instances: How many groups of ranks each hold all shards.
        outer_strategy: What is cut over these too.

    Raises:
        ConfigError: the ranks cannot be cut into so many groups, or there is one alone.
        PrecisionError: gradients would have another dtype than the main weights.
    """
    if num_instances == 1 and outer_strategy != "no_shard":
        raise ConfigError(
            f"--outer-dp-sharding-strategy {outer_strategy} needs several instances to cut over: "
            "add --num-distributed-optimizer-instances"
        )
    mesh = _mesh_of(model, num_instances)
    for module in (*model.blocks, model):
        graphfsdp.fully_shard(
            module,
            mesh,
            strategy=strategy,
            mp_policy=policy,
            outer_strategy=outer_strategy,
        )


def _mesh_of(model: GPT, num_instances: int) -> DeviceMesh | None:
    num_ranks = dist.get_world_size()
    if num_ranks % num_instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {num_instances} does not divide the "
            f"{num_ranks} ranks"
        )
    if num_instances == 1:
        return None
    device_type = next(model.parameters()).device.type
    if device_type == "meta":
        on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
        device_type = "cuda" if on_gpu else "cpu"
    return init_device_mesh(
        device_type,
        (num_instances, num_ranks // num_instances),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )


@dataclass(frozen=True)
class ShardSizes:
    """What this rank keeps of a sharded model.

    Attributes:
        num_units: Modules that are gathered and reduced as a whole.
        weight_bytes: Main weights, padding included.
        grad_bytes: Main grads, padding included.
    """

    num_units: int
    weight_bytes: int
    grad_bytes: int


def shard_sizes(model: nn.Module) -> ShardSizes:
    """Return what this rank keeps of a model that ``fully_shard`` has cut."""
    units = [
        unit_of(module) for module in model.modules() if isinstance(module, graphfsdp.FSDPModule)
    ]
    buffers = [buffer for unit in units for buffer in unit.group.buffers]
    return ShardSizes(
        num_units=len(units),
        weight_bytes=sum(buffer.main.nbytes for buffer in buffers),
        grad_bytes=sum(buffer.grad.nbytes for buffer in buffers if buffer.grad is not None),
    )


def whole_state(model: nn.Module, *, dtype: torch.dtype, keep: bool) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers, sharded ones gathered to the CPU.

    Every rank must call it, and gathers one parameter at a time. A tensor that has several names
    is the same object under each, as in the model.

    Args:
        model: Sharded or not.
        dtype: Of the model weights; sharded parameters are main weights, which may be wider.
        keep: Return the state; else nothing is kept, and the result is empty.
    """
    state: dict[str, Tensor] = {}
    gathered: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_dtensor(tensor):
            if id(tensor) not in gathered:
                whole = tensor.full_tensor().detach()
                gathered[id(tensor)] = whole.to("cpu", dtype) if keep else whole.new_empty(0)
            tensor = gathered[id(tensor)]
        if keep:
            state[name] = tensor
    return state
