"""Dtypes of sharded weights and gradients, against an emulation by plain PyTorch.

With two ranks a + b is b + a, so nothing depends on the order of additions, and the emulation lays
its weights out as the units do. What is left is that Adam's vectors end elsewhere in a shard than
in a whole tensor: an ulp of a weight now and then, and what an ulp may grow to (TOLERANCE). One
gradient that is rounded once too often or too seldom moves weights by far more, which a test shows.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.optim import FusedAdam
from helpers import NUM_STEPS, set_lr
from ranks import on_ranks, rank_device
from sharding_helpers import (
    ADAM_EPS,
    Net,
    Training,
    assert_replayed,
    assert_same_training,
    batches,
    buffers,
    learning_rate,
    num_steps_of,
    shard,
    train,
    units,
)

TOLERANCE = 1e-5
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Precision:
    """A policy, and the dtype in which the model comes."""

    policy: MixedPrecisionPolicy
    model: torch.dtype = FP32

    @property
    def main(self) -> torch.dtype:
        return self.policy.main_params_dtype or self.model

    @property
    def compute(self) -> torch.dtype:
        return self.policy.param_dtype or self.model

    @property
    def grad(self) -> torch.dtype:
        return self.policy.main_grads_dtype or self.main

    @property
    def comm(self) -> torch.dtype:
        return self.policy.grad_comm_dtype or self.grad


PRECISIONS = {
    "bf16_compute": Precision(MixedPrecisionPolicy(param_dtype=BF16)),
    "bf16_grads": Precision(
        MixedPrecisionPolicy(param_dtype=BF16, main_grads_dtype=BF16, use_decoupled_grad=True)
    ),
    "bf16_comm": Precision(MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16)),
    "fp16_comm": Precision(MixedPrecisionPolicy(grad_comm_dtype=FP16)),
    "fp32_comm": Precision(
        MixedPrecisionPolicy(main_grads_dtype=BF16, grad_comm_dtype=FP32, use_decoupled_grad=True)
    ),
    "bf16_model": Precision(MixedPrecisionPolicy(main_params_dtype=FP32), model=BF16),
    "all_bf16": Precision(MixedPrecisionPolicy(), model=BF16),
}


def make_model(precision: Precision) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(rank_device(), precision.model)


def make_optimizer(params: Any, decoupled: bool) -> FusedAdam:
    return FusedAdam(params, lr=0.02, eps=ADAM_EPS, weight_decay=0.1, use_decoupled_grad=decoupled)


def sharded_run(
    name: str, strategy: str, microbatches: int, scope: str, num_steps: int
) -> Training:
    precision = PRECISIONS[name]
    model = shard(make_model(precision), strategy, mp_policy=precision.policy)
    for buffer in buffers(model, trainable=True):
        assert buffer.main.dtype == precision.main
        assert buffer.grad is not None
        assert buffer.grad.dtype == precision.grad
        assert buffer.unshard().dtype == precision.compute
        buffer.reshard()
    decoupled = precision.policy.use_decoupled_grad
    optim = make_optimizer([p for p in model.parameters() if p.requires_grad], decoupled)
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": None}
    result = train(model, optim, scope=scope, num_steps=num_steps, **options)
    kind, other = ("decoupled_grad", "grad") if decoupled else ("grad", "decoupled_grad")
    for unit in units(model):
        for item in unit.group.trainable:
            got = getattr(item.param, kind, None)
            assert got is None or got is item.main_grad
            assert getattr(item.param, other, None) is None
    return result


def emulated_run(
    name: str, strategy: str, microbatches: int, num_steps: int = NUM_STEPS
) -> list[Training]:
    """Do by hand what the policy says, for all ranks in this process."""
    precision, num_ranks = PRECISIONS[name], dist.get_world_size()
    model = make_model(precision)
    twin = shard(make_model(precision), strategy, mp_policy=precision.policy)
    main = {
        key: nn.Parameter(param.detach().to(precision.main), requires_grad=param.requires_grad)
        for key, param in model.named_parameters()
    }
    optim = make_optimizer([p for p in main.values() if p.requires_grad], decoupled=True)
    results = [Training() for _ in range(num_ranks)]
    for index, batch in enumerate(batches(num_steps)):
        set_lr(optim, learning_rate(index))
        full: list[dict[str, Tensor]] = [{} for _ in range(num_ranks)]
        grads: dict[str, Tensor] = {}
        losses: list[list[Tensor]] = [[] for _ in range(num_ranks)]
        for microbatch in range(microbatches):
            for rank in range(num_ranks):
                part = _part(batch, rank * microbatches + microbatch, num_ranks * microbatches)
                loss, found = _gradients(
                    model, _laid_out(twin, main), part, precision, microbatches
                )
                losses[rank].append(loss)
                _add(full[rank], found)
            if strategy in ("optim_grads", "optim_grads_params") or microbatch + 1 == microbatches:
                reduced = {
                    key: torch.stack([of_rank[key] for of_rank in full]).sum(0) / num_ranks
                    for key in full[0]
                }
                _add(grads, {key: grad.to(precision.grad) for key, grad in reduced.items()})
                full = [{} for _ in range(num_ranks)]
        for key, param in main.items():
            param.decoupled_grad = grads.get(key)  # type: ignore[attr-defined]
        optim.step()
        for rank in range(num_ranks):
            parts = losses[rank]
            results[rank].losses.append(parts[0] if len(parts) == 1 else torch.stack(parts).mean(0))
    for result in results:
        result.params = {key: param.detach().clone() for key, param in main.items()}
    return results


def _part(batch: tuple[Tensor, ...], index: int, count: int) -> list[Tensor]:
    length = len(batch[0]) // count
    return [part[index * length : (index + 1) * length].to(rank_device()) for part in batch]


def _laid_out(twin: nn.Module, main: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the weights in the compute dtype, at the places that a gathered buffer has."""
    whole: dict[str, Tensor] = {}
    for unit in units(twin):
        flats = {
            id(buffer): torch.zeros(
                buffer.layout.total_numel, dtype=buffer.dtypes.compute, device=rank_device()
            )
            for buffer in unit.group.buffers
        }
        prefix = next(key for key, module in twin.named_modules() if module is unit.modules[0])
        for item in unit.group.managed:
            key = f"{prefix}.{item.name}".lstrip(".")
            view = item.buffer.full_view(flats[id(item.buffer)], item.slot)
            view.copy_(main[key].detach())
            whole[key] = view.requires_grad_(main[key].requires_grad)
    return whole


def _gradients(
    model: nn.Module,
    whole: dict[str, Tensor],
    part: list[Tensor],
    precision: Precision,
    microbatches: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.func.functional_call(model, whole, tuple(part))
    (loss / microbatches if microbatches > 1 else loss).backward()
    found = {
        key: param.grad.to(precision.comm) for key, param in whole.items() if param.grad is not None
    }
    return loss.detach(), found


def _add(held: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for key, grad in more.items():
        held[key] = held[key].add(grad) if key in held else grad


@pytest.mark.parametrize(
    ("name", "strategy", "microbatches"),
    [
        ("bf16_compute", "optim_grads_params", 1),
        ("fp16_comm", "no_shard", 1),
        ("fp32_comm", "optim_grads_params", 1),
        ("bf16_model", "no_shard", 1),
        ("bf16_model", "optim_grads_params", 1),
        ("all_bf16", "optim", 1),
        # What is rounded in each microbatch and what at last: by strategy.
        *(("bf16_grads", strategy, 3) for strategy in ("no_shard", "optim_grads")),
        *(("bf16_comm", strategy, 3) for strategy in ("optim", "optim_grads_params")),
    ],
)
@on_ranks("ranks2")
def test_a_policy_does_what_it_says(name: str, strategy: str, microbatches: int) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")
    eager = sharded_run(name, strategy, microbatches, "none", num_steps)
    captured = sharded_run(name, strategy, microbatches, "full_iteration", num_steps)
    assert_same_training(eager, captured)
    assert_replayed(captured, num_steps)
    expected = emulated_run(name, strategy, microbatches, num_steps)[dist.get_rank()]
    assert difference(expected, captured) <= TOLERANCE
    assert all(param.dtype == PRECISIONS[name].main for param in captured.params.values())
    assert min(float(loss) for loss in captured.losses) < float(captured.losses[0])


def difference(left: Training, right: Training) -> float:
    """Return the largest difference of two losses or weights."""
    pairs = [*zip(left.losses, right.losses, strict=True)]
    assert list(left.params) == list(right.params)
    pairs += [(param, right.params[key]) for key, param in left.params.items()]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


@on_ranks("ranks2")
def test_a_wrong_dtype_would_be_seen() -> None:
    """By how far the emulated policies are from each other."""
    runs = {name: emulated_run(name, "no_shard", 1)[dist.get_rank()] for name in PRECISIONS}
    names = [name for name in PRECISIONS if PRECISIONS[name].main == FP32]
    pairs = itertools.combinations(sorted(names), 2)
    apart = {pair: difference(runs[pair[0]], runs[pair[1]]) for pair in pairs}
    # In one microbatch it is the same whether sums are rounded on the way or in the buffer.
    assert apart.pop(("bf16_comm", "bf16_grads")) == 0
    assert min(apart.values()) > 3 * TOLERANCE, apart


@on_ranks("ranks2")
def test_each_unit_has_main_grads_of_its_own_dtype() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank_device())
    for layer, dtype in zip(model, (BF16, FP32), strict=True):
        policy = MixedPrecisionPolicy(main_grads_dtype=dtype, use_decoupled_grad=True)
        graphfsdp.fully_shard(layer, mp_policy=policy)
    graphfsdp.fully_shard(model)(torch.ones(2, 4, device=rank_device())).sum().backward()
    found = [layer.weight.decoupled_grad.dtype for layer in model]
    assert found == [BF16, FP32]
