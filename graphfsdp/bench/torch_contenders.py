"""What people use instead, from PyTorch: a plain loop, torch.compile, FSDP2."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from graphfsdp.bench.batches import Batch
from graphfsdp.bench.contender import (
    BETAS,
    EPS,
    MAX_GRAD_NORM,
    PEAK_LR,
    WEIGHT_DECAY,
    Contender,
    GraphFacts,
    Setting,
    initial_model,
)


class TorchLoop(Contender):
    """The loop that PyTorch's tutorials teach: backward, clip, AdamW(fused=True), zero_grad."""

    def __init__(
        self, forward: Callable[..., Any], model: nn.Module, *, autocast: torch.device | None
    ) -> None:
        """Prepare to train.

        Args:
            forward: Computes the loss of a batch.
            model: Whose parameters to train.
            autocast: Device on which forward runs under bfloat16 autocast; None for no autocast.
        """
        self._forward = forward
        self._params = list(model.parameters())
        self._autocast = autocast
        self.optimizer = torch.optim.AdamW(
            self._params, lr=PEAK_LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def train(self, batch: Batch) -> Tensor:  # [] float32 loss
        """Train one step."""
        with self._precision():
            loss: Tensor = self._forward(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._params, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._autocast.type, dtype=torch.bfloat16)


class ReduceOverheadLoop(TorchLoop):
    """The loop around ``torch.compile(mode="reduce-overhead")``, with CUDA graphs of its own."""

    def train(self, batch: Batch) -> Tensor:  # [] float32 loss
        """Train one step; the loss is copied, since the next step overwrites it."""
        torch.compiler.cudagraph_mark_step_begin()
        return super().train(batch).clone()

    def graph_facts(self) -> GraphFacts:
        """Tell where torch left its graphs out."""
        from torch._dynamo.utils import counters

        skips = counters["inductor"]["cudagraph_skips"]
        if not skips:
            return GraphFacts()
        return GraphFacts(
            notes=(f"torch reports {skips} place(s) where it used no CUDA graph, so these ran as "
                   "under plain torch.compile",)
        )  # fmt: skip


def plain(setting: Setting) -> Contender:
    """Return the plain loop; on several ranks around DistributedDataParallel."""
    model = _replicated(setting)
    return TorchLoop(model, model, autocast=_autocast(setting))


def compiled(setting: Setting) -> Contender:
    """Return the loop around ``torch.compile(model)``."""
    model = _replicated(setting)
    return TorchLoop(torch.compile(model), model, autocast=_autocast(setting))


def reduce_overhead(setting: Setting) -> Contender:
    """Return the loop around ``torch.compile(model, mode="reduce-overhead")``."""
    model = _replicated(setting)
    forward = torch.compile(model, mode="reduce-overhead")
    return ReduceOverheadLoop(forward, model, autocast=_autocast(setting))


def fsdp2(setting: Setting) -> Contender:
    """Return PyTorch's ``fully_shard`` on each block and the root, with fused AdamW."""
    return _fsdp2(setting, compile_blocks=False)


def fsdp2_compiled(setting: Setting) -> Contender:
    """Return the same with each block compiled, before it is sharded."""
    return _fsdp2(setting, compile_blocks=True)


def _fsdp2(setting: Setting, *, compile_blocks: bool) -> Contender:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = initial_model(setting)
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if setting.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.ModuleList)
    for index, block in enumerate(blocks):
        if compile_blocks:
            blocks[index] = _compile_module(block)
        fully_shard(blocks[index], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return TorchLoop(model, model, autocast=None)


def _compile_module(module: nn.Module) -> nn.Module:
    made: Any = torch.compile(module)  # an OptimizedModule; its annotation says a function
    assert isinstance(made, nn.Module)
    return made


def _autocast(setting: Setting) -> torch.device | None:
    return setting.device if setting.bf16 else None


def _replicated(setting: Setting) -> nn.Module:
    model = initial_model(setting)
    if not setting.ranks.launched:
        return model
    devices = [setting.device] if setting.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices)
