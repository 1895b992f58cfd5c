"""Dtypes of sharded weights and gradients: what a policy says is rounded, and nothing else.

Weights that are gathered in 8 bits: the same numbers captured, on any ranks, few bytes.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import MixedPrecisionPolicy
from graphfsdp.eight_bit.cast import from_float8, from_mxfp8, scales_of, to_float8, to_mxfp8
from overlap_helpers import Stack, Watch
from ranks import on_ranks, rank_device
from sharding_helpers import (
    adam,
    assert_equal_tensors,
    make_net,
    num_steps_of,
    replayed_as_eager,
    shard,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Precision:
    """A policy, and the dtype in which the model comes; of what it makes, the dtypes."""

    def __init__(self, policy: MixedPrecisionPolicy, model: torch.dtype = FP32) -> None:
        self.policy, self.model = policy, model
        self.main = policy.main_params_dtype or model
        self.compute = policy.param_dtype or model
        self.grad = policy.main_grads_dtype or self.main
        self.comm = policy.grad_comm_dtype or self.grad


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


class Probe(nn.Module):
    """Shows its weight as it computes with it; a batch is that weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 5))

    def forward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight, (self.weight * grad).sum()


def reduced_by_hand(grads: Tensor, precision: Precision, strategy: str) -> Tensor:
    """Return the mean over ranks of gradients [microbatch, rank, ...], rounded as is said."""
    sent = grads.to(precision.compute).to(precision.comm)
    if strategy in ("no_shard", "optim"):  # once, what microbatches have added up
        sent = _sum(sent)[None]
    return _sum((sent.sum(1) / dist.get_world_size()).to(precision.grad))


def _sum(terms: Tensor) -> Tensor:
    """Add one after the other, each sum rounded."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def gradients_are_rounded_as_is_said(precision: Precision, strategy: str, num_parts: int) -> None:
    """With two ranks a + b is b + a, so nothing depends on the order of additions."""
    torch.manual_seed(0)
    probe = Probe().to(rank_device(), precision.model)
    weight = probe.weight.detach().clone()
    model: Any = graphfsdp.fully_shard(probe, strategy=strategy, mp_policy=precision.policy)
    grads = torch.randn(num_parts, dist.get_world_size(), *weight.shape).to(rank_device())
    for index, part in enumerate(grads[:, dist.get_rank()]):
        model.set_is_last_microbatch(index + 1 == num_parts)
        shown, loss = model(part)
        assert shown.dtype == precision.compute
        assert torch.equal(shown, weight.to(precision.main).to(precision.compute))
        loss.backward()
    kinds = ["grad", "decoupled_grad"]
    if precision.policy.use_decoupled_grad:
        kinds.reverse()
    assert getattr(model.weight, kinds[1], None) is None
    found = getattr(model.weight, kinds[0]).full_tensor()
    expected = reduced_by_hand(grads, precision, strategy)
    assert found.dtype == expected.dtype == precision.grad
    assert torch.equal(found, expected)


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
    precision = PRECISIONS[name]
    gradients_are_rounded_as_is_said(precision, strategy, microbatches)
    got = replayed_as_eager(
        partial(make_net, strategy, dtype=precision.model, mp_policy=precision.policy),
        num_steps=num_steps_of(strategy, "optim_grads_params"),
        microbatches=microbatches,
        max_grad_norm=None,
    )
    assert all(param.dtype == precision.main for param in got.params.values())
    assert min(float(loss) for loss in got.losses) < float(got.losses[0])


@on_ranks("ranks2")
def test_each_unit_has_main_grads_of_its_own_dtype() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank_device())
    for layer, dtype in zip(model, (BF16, FP32), strict=True):
        policy = MixedPrecisionPolicy(main_grads_dtype=dtype, use_decoupled_grad=True)
        graphfsdp.fully_shard(layer, mp_policy=policy)
    graphfsdp.fully_shard(model)(torch.ones(2, 4, device=rank_device())).sum().backward()
    found = [layer.weight.decoupled_grad.dtype for layer in model]
    assert found == [BF16, FP32]


FORMATS = ("float8", "float8_rowwise", "mxfp8")
WIDTH = 32


def make(gather_format: str | None, strategy: str = "optim_grads_params", **options: Any) -> Any:
    torch.manual_seed(0)
    width = options.pop("width", WIDTH)
    model = Stack(width, 2, options.pop("recompute", False))
    model.head = nn.Linear(width, 1)  # one rank has its only row
    dtypes = options.pop("policy", {"param_dtype": torch.bfloat16})
    policy = MixedPrecisionPolicy(gather_format=gather_format, **dtypes)
    return shard(model.to(rank_device()), strategy, mp_policy=policy, **options)


def data(index: int, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
    return torch.randn(12, width, generator=generator).to(rank_device())


def trained(num_steps: int, **options: Any) -> dict[str, Any]:
    data_of_rank = [(data(index),) for index in range(num_steps)]
    return {"num_steps": num_steps, "data": data_of_rank, "max_grad_norm": 1.0, **options}


DECOUPLED = {
    "param_dtype": torch.bfloat16,
    "main_grads_dtype": torch.bfloat16,
    "use_decoupled_grad": True,
}
MAINS_IN_BF16 = {"param_dtype": torch.bfloat16, "main_params_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("ranks", "gather_format", "microbatches", "options"),
    [
        ("ranks1", "float8", 1, {"policy": {}}),
        ("ranks2", "float8", 2, {}),
        ("ranks2", "float8", 1, {"strategy": "optim", "policy": {}}),
        ("ranks2", "float8", 2, {"strategy": "optim_grads"}),
        ("ranks2", "float8_rowwise", 2, {}),
        ("ranks2", "float8_rowwise", 2, {"recompute": True, "overlap": False}),
        ("ranks2", "mxfp8", 2, {}),
        ("ranks2", "mxfp8", 1, {"strategy": "no_shard", "policy": DECOUPLED}),
        ("ranks2", "mxfp8", 1, {"recompute": True, "policy": MAINS_IN_BF16}),
        ("ranks4", "float8_rowwise", 2, {"policy": DECOUPLED}),
        ("ranks4", "mxfp8", 1, {"outer_strategy": "optim"}),
        ("ranks4", "float8", 1, {"reshard_after_forward": 2}),
        *(
            pytest.param("gpu_ranks", each, 2, options, marks=pytest.mark.gpu)
            for each, options in (
                ("float8", {"policy": {}}),
                ("float8_rowwise", {"recompute": True}),
                ("mxfp8", {}),
                ("mxfp8", {"policy": MAINS_IN_BF16}),
            )
        ),
    ],
)
@on_ranks()
def test_replays_equal_eager(
    gather_format: str, microbatches: int, options: dict[str, Any]
) -> None:
    # Ten replays for each kind of weights.
    is_long = rank_device().type == "cuda" or (microbatches, options) == (2, {})
    num_steps = num_steps_of(is_long, True)
    options = {"gather_format": gather_format} | options
    usual = {key: value for key, value in options.items() if key != "reshard_after_forward"}
    run = replayed_as_eager(
        lambda: make(**options),
        eager=lambda: make(**usual),
        **trained(num_steps, microbatches=microbatches),
    )
    # Once an iteration, for all weights.
    counts = run.report.op_counts
    assert counts["graphfsdp.pack_.default"] == 1
    assert counts.get("graphfsdp.find_amax_.default", 0) == (gather_format != "mxfp8")


def quantised(weight: Tensor, gather_format: str, dtype: torch.dtype) -> Tensor:
    if gather_format == "mxfp8":
        return from_mxfp8(*to_mxfp8(weight), dtype)
    by_rows = gather_format == "float8_rowwise"
    amax = weight.abs().amax(1, keepdim=True) if by_rows else weight.abs().amax()
    scale = scales_of(amax, powers_of_two=by_rows)
    return from_float8(to_float8(weight, scale), scale, dtype)


@pytest.mark.parametrize("gather_format", FORMATS)
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [("ranks2", "optim_grads_params"), ("ranks4", "optim_grads_params"), ("ranks4", "no_shard")],
)
@on_ranks()
def test_layers_compute_with_what_the_numbers_stand_for(strategy: str, gather_format: str) -> None:
    """Scales do not depend on where ranks are cut, and one without rows takes part."""
    model = make(gather_format, strategy)
    mains = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    model.unshard()
    for block in model.blocks:
        block.unshard()
    for name, param in model.named_parameters():
        expected = mains[name].bfloat16()
        if name.endswith("weight") and param.dim() == 2:
            expected = quantised(mains[name], gather_format, torch.bfloat16)
            assert not torch.equal(expected, mains[name].bfloat16())
        assert torch.equal(param, expected), name


@pytest.mark.parametrize("gather_format", FORMATS)
@on_ranks("ranks2")
def test_what_follows_a_cast_or_an_end_by_hand_has_new_numbers(gather_format: str) -> None:
    for is_cast in (True, False):
        model, fresh = make(gather_format), make(gather_format)
        model.set_manual_backward_finalization(not is_cast)
        loss = model(data(0))
        if is_cast:
            for each in (model, fresh):
                each.to(torch.bfloat16)  # main weights, into other memory
        else:
            loss.backward()
            model.finalize_backward()
        for param in (*model.parameters(), *fresh.parameters()):
            param.data.mul_(2)  # what no counter of versions sees
        assert torch.equal(model(data(1)), fresh(data(1)))


def wire(gather_format: str | None) -> tuple[int, list[int]]:
    """Return what the third iteration of two microbatches sends, wide enough for a real ratio.

    In bytes: that gathers carry, and of largest magnitudes for each all-reduce of them.
    """
    model = make(gather_format, width=256)
    optim = adam(model)
    gathered: list[int] = []
    magnitudes: list[int] = []
    with graphfsdp.capture(model, optim, scope="none", microbatches=2) as step:
        step(data(0, 256))
        step(data(1, 256))
        with (
            Watch("all_gather", lambda whole, part: gathered.append(whole.nbytes)),
            Watch("all_reduce", lambda amax, group: magnitudes.append(amax.nbytes)),
        ):
            step(data(2, 256))
    return sum(gathered), magnitudes


@on_ranks("ranks2")
def test_the_wire_carries_half() -> None:
    plain, magnitudes = wire(None)
    assert not magnitudes
    for gather_format, most in (("float8", 0.52), ("float8_rowwise", 0.52), ("mxfp8", 0.55)):
        packed, magnitudes = wire(gather_format)
        assert len(magnitudes) == (gather_format != "mxfp8")  # one for all weights
        sent = packed + 2 * sum(magnitudes)  # an all-reduce goes round twice
        assert 0.5 < sent / plain <= most, gather_format


@pytest.mark.parametrize(
    ("gather_format", "strategy"),
    [
        *((each, "optim_grads_params") for each in (None, *FORMATS)),
        (None, "optim"),
    ],
)
@on_ranks("ranks2")
def test_a_live_graph_and_evaluations_compute_with_the_main_weights_of_now(
    gather_format: str | None, strategy: str, tmp_path: Path
) -> None:
    """Stepped, loaded or broken ones. Those of a bfloat16 run are as good, and the other way."""
    with torch.no_grad():
        other = make(None, strategy)
        for param in other.parameters():
            param.mul_(1.5)
    loaded = {name: value.clone() for name, value in other.state_dict().items()}
    model, fresh = (make(gather_format, strategy) for _ in range(2))
    with graphfsdp.capture(model, adam(model), skip_nonfinite=True, max_grad_norm=1.0) as step:
        for index in range(6):
            step(data(index))
        before = model(data(7)).detach()
        step(data(8))
        with torch.no_grad():
            after = model(data(7))
        fresh.load_state_dict(model.state_dict())
        assert not torch.equal(before, after)
        assert torch.equal(fresh(data(7)), after)
        weights = [block.up.weight for block in model.blocks]
        with torch.no_grad():  # what no counter of versions sees
            weights[0].data.mul_(3)
            torch._foreach_mul_(weights, 2.0)
        fresh.load_state_dict(model.state_dict())
        expected = fresh(data(7))
        assert not torch.equal(expected, after)
        assert torch.equal(step(data(7)), expected)
        model.load_state_dict(loaded)
        loss = step(data(9))
        graphfsdp.save(tmp_path / "step", model)
        graphfsdp.load(tmp_path / "step", other)
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        with torch.no_grad():
            model.blocks[0].up.weight.to_local().fill_(torch.inf)
        kept = [param.to_local().clone() for param in model.parameters()]
        step(data(6))
        assert step.skipped_steps is not None
        assert int(step.skipped_steps) == 1
    assert_equal_tensors(kept, [param.to_local() for param in model.parameters()])
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh(data(9)), loss)
