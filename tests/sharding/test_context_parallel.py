"""torch's own context parallelism beside ``fully_shard``: each rank has a part of each sequence.

torch has no such attention on a CPU, so this runs where there are GPUs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphfsdp
from graphfsdp import GuardError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig
from ranks import on_ranks, rank_device
from sharding_helpers import full_parameters, hybrid_mesh, raises_on_rank

NUM_STEPS = 7
LENGTH, VOCABULARY = 16, 17
SHAPE = GPTConfig(
    vocab_size=VOCABULARY, seq_length=LENGTH, num_layers=2, hidden_size=32, num_attention_heads=2
)

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]


def _model(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Half precision: attention's kernels.
    model: Any = GPT(SHAPE).to(rank_device(), torch.bfloat16)
    for module in (*model.blocks, model):
        graphfsdp.fully_shard(module, mesh)
    return model, FusedAdam(model.parameters(), lr=1e-2)


def _batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY, (NUM_STEPS, 2, 2, LENGTH), generator=generator)
    return [[tokens.clone().to(rank_device()) for tokens in batch] for batch in drawn]


@contextmanager
def _parts(mesh: DeviceMesh, batch: Sequence[Tensor]) -> Iterator[None]:
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    cut = context_parallel(
        mesh, buffers=list(batch), buffer_seq_dims=[1] * len(batch), no_restore_buffers={*batch}
    )
    with cut, sdpa_kernel(kernels):
        yield


@on_ranks("gpu_ranks")
def test_captured_parts_of_sequences_train_as_a_plain_loop() -> None:
    mesh = hybrid_mesh((dist.get_world_size(),), ("cp",))
    model, optimizer = _model(mesh)
    cut, losses = [], []
    for batch in _batches():
        with _parts(mesh, batch):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        cut.append(batch)
    expected = full_parameters(model)
    for scope in ("none", "full_iteration"):
        model, optimizer = _model(mesh)
        # Entered once: whoever enters replaces torch's attention by a new function.
        with (
            _parts(mesh, [torch.zeros(1, LENGTH, device=rank_device())]),
            graphfsdp.capture(model, optimizer, scope=scope) as step,
        ):
            got = [step(*batch) for batch in cut]
            assert step.phase.value == ("eager" if scope == "none" else "replay")
        assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True))
        for name, weight in full_parameters(model).items():
            assert torch.equal(weight, expected[name]), name


@on_ranks("gpu_ranks")
def test_attention_that_is_replaced_in_each_iteration_is_refused() -> None:
    mesh = hybrid_mesh((dist.get_world_size(),), ("cp",))
    model, optimizer = _model(mesh)
    with graphfsdp.capture(model, optimizer) as step:
        *first, last = _batches()
        for batch in first[:4]:
            with _parts(mesh, batch):
                step(*batch)
        with _parts(mesh, last), raises_on_rank(GuardError, "scaled_dot_product_attention"):
            step(*last)
