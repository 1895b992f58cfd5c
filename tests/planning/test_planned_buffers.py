"""Whole weights and gradients as `graphfsdp plan` tells them and as real worlds have them."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_planning import POLICIES, SHAPE
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphfsdp
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.activations import Lives
from graphfsdp.planning.model_plan import plan_model
from graphfsdp.sharding.buffer import ShardBuffer
from graphfsdp.training.gpt import GPT
from ranks import RankPool
from sharding_helpers import units as sharded_units

NUM_ITERATIONS = 5
Case = tuple[str, str, bool, int]  # strategy, policy, overlap, microbatches
CASES: list[Case] = [
    ("no_shard", "bf16", True, 1),
    ("optim", "bf16", True, 1),
    ("optim", "fp32", False, 3),
    ("optim_grads", "bf16", False, 1),
    ("optim_grads", "fp32", True, 3),
    ("optim_grads_params", "bf16", True, 1),
    ("optim_grads_params", "bf16", False, 1),
    ("optim_grads_params", "fp32", True, 3),
    ("optim_grads_params", "bf16", False, 3),
]


class Stack(nn.Module):
    """Blocks of several parameters between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 12)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(3)
        )
        self.head = nn.Linear(12, 37)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.first(tokens[..., None].to(self.first.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


class Odd(nn.Module):
    """A unit that is left out, one that runs twice, one that is recomputed, frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 37)
        self.blocks[2].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = nn.functional.one_hot(tokens, 37).to(self.head.weight.dtype)[..., :12]
        for index in (3, 0, 2, 0):
            x = self.blocks[index](x).tanh()
        x = checkpoint(self.blocks[3], x, use_reentrant=False)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "gpt": (lambda: GPT(SHAPE), tuple(f"blocks.{index}" for index in range(2))),
    "stack": (Stack, tuple(f"blocks.{index}" for index in range(3))),
    "odd": (Odd, tuple(f"blocks.{index}" for index in range(4))),
}


class Patient(Lives):
    """Waits for gloo's threads, which let go of a buffer a little late."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self._expected = expected

    def add(self, storage: torch.UntypedStorage) -> None:
        deadline = time.monotonic() + 0.5
        while self.now() + storage.nbytes() > self._expected and time.monotonic() < deadline:
            time.sleep(0.001)
        super().add(storage)


def real_peaks(name: str, planned: dict[Case, int], options: dict[str, Any]) -> dict[Case, int]:
    """Train with each setting, and return the most that lived at one time."""
    outer = options.get("outer")
    num_outer = 1 if outer is None else 2
    shape = (num_outer, dist.get_world_size() // num_outer)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    found = {}
    new_whole = ShardBuffer.new_whole
    for case, expected in planned.items():
        strategy, policy, overlap, microbatches = case
        torch.manual_seed(0)
        make, units = MODELS[name]
        model = make()
        for unit in (*units, ""):
            graphfsdp.fully_shard(
                model.get_submodule(unit),
                mesh["dp_shard"] if outer is None else mesh,
                strategy=strategy,
                mp_policy=POLICIES[policy],
                outer_strategy=outer or "no_shard",
                overlap=overlap,
                reshard_after_forward=options.get("reshard_after_forward", True),
            )
        lives = Patient(expected)

        def counted(buffer: ShardBuffer, dtype: torch.dtype, lives: Patient = lives) -> Tensor:
            whole = new_whole(buffer, dtype)
            lives.add(whole.untyped_storage())
            return whole

        optimizer = FusedAdam(model.parameters())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardBuffer, "new_whole", counted)
            for buffer in (b for unit in sharded_units(model) for b in unit.group.buffers):
                if buffer.gradients is not None:
                    patch.setattr(buffer.gradients, "_new_whole", buffer.new_whole)
            with graphfsdp.capture(
                model, optimizer, scope="none", microbatches=microbatches
            ) as step:
                for _ in range(NUM_ITERATIONS):
                    tokens = torch.randint(37, (2 * microbatches, SHAPE.seq_length))
                    step(tokens, tokens)
        found[case] = lives.peak_bytes
    return found


def planned_peaks(
    name: str, cases: list[Case], num_ranks: int, options: dict[str, Any]
) -> dict[Case, int]:
    outer = options.get("outer")
    make, units = MODELS[name]
    with torch.device("meta"):
        model = make()
        tokens = torch.empty((2, SHAPE.seq_length), dtype=torch.int64)
    found = {}
    for strategy, policy, overlap, microbatches in cases:
        plan = plan_model(
            model,
            units,
            lambda copy: copy(tokens, tokens),
            num_ranks=num_ranks,
            num_outer=1 if outer is None else 2,
            cuts_outside=outer == "optim",
            strategy=strategy,
            mp_policy=POLICIES[policy],
            num_microbatches=microbatches,
            overlap=overlap,
            reshard_after_forward=options.get("reshard_after_forward", True),
        )
        found[strategy, policy, overlap, microbatches] = plan.whole.whole_bytes
    return found


def test_planned_buffers_are_those_of_two_ranks(ranks2: RankPool) -> None:
    planned = planned_peaks("stack", CASES, 2, {})
    for real in ranks2.run(real_peaks, "stack", planned, {}):
        assert planned == real
    assert not planned["no_shard", "bf16", True, 1]
    alone, ahead = (planned["optim_grads_params", "bf16", each, 1] for each in (False, True))
    assert alone < ahead < planned["optim", "bf16", True, 1]


GATHERED: Case = ("optim_grads_params", "bf16", True, 3)
ALONE: Case = ("optim_grads_params", "fp32", False, 1)


@pytest.mark.parametrize(
    ("num_ranks", "name", "cases", "options"),
    [
        (2, "gpt", [GATHERED, ("optim", "bf16", False, 1)], {}),
        (4, "stack", [GATHERED], {"outer": "no_shard"}),
        (4, "stack", [ALONE, ("optim", "fp32", True, 3)], {"outer": "optim"}),
        (
            *(2, "odd"),
            [("optim_grads_params", "fp32", True, 1), GATHERED, ("optim_grads", "fp32", False, 3)],
            {},
        ),
        (2, "stack", [ALONE], {"reshard_after_forward": False}),
    ],
    ids=["tied embeddings", "instances", "cut twice", "odd orders of units", "weights stay whole"],
)
def test_planned_buffers_are_those_of_other_worlds(
    ranks2: RankPool,
    ranks4: RankPool,
    num_ranks: int,
    name: str,
    cases: list[Case],
    options: dict[str, Any],
) -> None:
    planned = planned_peaks(name, cases, num_ranks, options)
    for real in (ranks2 if num_ranks == 2 else ranks4).run(real_peaks, name, planned, options):
        assert planned == real


def test_a_plan_touches_neither_the_model_nor_torch() -> None:
    model = Odd()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    tokens = torch.empty((2, 5), dtype=torch.int64, device="meta")
    plan = plan_model(model, ["blocks.0"], lambda copy: copy(tokens, tokens), num_ranks=64)
    assert plan.whole.whole_bytes > 0
    assert not dist.is_initialized()
    assert type(model) is Odd
    assert all(not module._forward_pre_hooks for module in model.modules())
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None


def test_more_microbatches_than_three_change_nothing() -> None:
    few, many = ([(*GATHERED[:3], count)] for count in (3, 50))
    peaks = [planned_peaks("stack", cases, 2, {}).values() for cases in (few, many)]
    assert [*peaks[0]] == [*peaks[1]]
