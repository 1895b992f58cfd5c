"""Experts beside a layer of the same weights with sizes from the data; on ranks beside one process.

Shapes: N = sequences, P = positions, C = width, F = width of an expert, E = experts, K of a token.
"""

import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphfsdp
from graphfsdp import ConfigError
from graphfsdp.moe import Experts, MoE, Router, overflowed_tokens
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, check_against_eager, no_host_sync
from iterations import steps_once
from moe_models import (
    VOCABULARY,
    MixedModel,
    assert_same_sums,
    dropless,
    experts_on_ranks,
    tokens_of,
)
from ranks import on_ranks, rank_device
from sharding_helpers import (
    adam,
    learning_rate,
    my_part,
    replayed_as_eager,
    train,
)

E, K, C = 4, 2, 16


def batch(generator: torch.Generator) -> Batch:
    return Batch(tokens_of(6, generator))


@pytest.mark.parametrize(
    ("dtype", "width", "num_experts", "topk", "num_tokens", "options"),
    [
        (torch.float32, 8, 4, 2, 24, {}),
        (torch.float32, 7, 3, 1, 11, {"swiglu": False}),
        (torch.float32, 20, 8, 2, 3, {"score_function": "sigmoid", "bias_update_rate": 0.1}),
        (torch.bfloat16, 32, 16, 4, 200, {"capacity_factor": 4.0}),
        (torch.float64, 13, 5, 5, 77, {"aux_loss_coeff": 0.3}),
    ],
    ids=str,
)
def test_experts_equal_dropless_ones_whose_sizes_are_those_of_the_data(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    num_experts: int,
    topk: int,
    num_tokens: int,
    options: dict[str, Any],
) -> None:
    """Forward, gradients and weights after steps; on a CPU bit for bit.

    A GPU adds in an order that depends on sizes. What AdamW makes of the last bits of a gradient
    that is nearly zero has no bound, so there each step begins with the same weights.
    """
    ours = MoE(width, 64, num_experts, topk=topk, **options).to(device, dtype)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for _ in range(3):
        x = torch.randn(1, num_tokens, width, device=device).to(dtype)
        found = []
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            given = x.clone().requires_grad_()
            y, aux_loss = (layer if layer is ours else lambda x: dropless(theirs, x))(given)
            (y.square().mean() + aux_loss).backward()
            found.append([y, aux_loss, given.grad, *(p.grad for p in layer.parameters())])
            optimizer.step()
            optimizer.zero_grad()
            layer.end_iteration()
            found[-1] += [layer.router.expert_bias]
            if device.type == "cpu":
                found[-1] += layer.parameters()
        for mine, expected in zip(*found, strict=True):
            assert_same_sums(mine, expected)
        if device.type != "cpu":
            theirs.load_state_dict(ours.state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert int(overflowed_tokens(ours)) == 0
    assert int(ours.router.tokens_per_expert.sum()) == 3 * num_tokens * topk


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"bias_update_rate": 0.01, "score_function": "sigmoid"}, {"max_grad_norm": 1.0}),
        (
            {
                **{"capacity_factor": 0.5, "topk": 1, "swiglu": False},
                **{"aux_loss_coeff": 0.1, "recomputes": True},
            },
            {"max_grad_norm": 1.0, "microbatches": 3},
        ),
        # What ends an iteration is called behind the user's function too.
        ({"bias_update_rate": 0.01}, {"iteration": steps_once(nn.Module.__call__)}),
    ],
    ids=["bias", "capacity", "iteration"],
)
def test_replay_equals_eager_and_counts_as_it(
    device: torch.device, options: dict[str, Any], how: dict[str, Any]
) -> None:
    """Counts and bias are buffers, which are compared after each call too."""
    trace = check_against_eager(Case(lambda: MixedModel(**options), batch), device, **how)
    before, last = trace.snapshots[-2:]
    router = "buffer blocks.0.moe.router"
    # Once each, although forward passes may have run twice.
    counts = last[f"{router}.tokens_per_expert"]
    assert int(counts.sum()) == len(trace.outputs) * 6 * 5 * options.get("topk", 2)
    overflow = last["buffer blocks.0.moe.overflow_per_expert"]
    assert (int(overflow.sum()) > 0) == ("capacity_factor" in options)
    moves = not torch.equal(*(state[f"{router}.expert_bias"] for state in (before, last)))
    assert moves == ("bias_update_rate" in options)


def crowded(device: torch.device, **options: Any) -> tuple[MoE, Tensor]:
    """A layer in which all tokens choose expert 1 first, and expert 3 second, and its input."""
    layer = MoE(C, 64, E, topk=K, **options).to(device)
    with torch.no_grad():
        layer.router.gate.weight.zero_()
        layer.router.gate.weight[:, 0] = torch.tensor([0.0, 2.0, -1.0, 1.0])
    x = torch.randn(2, 6, C, device=device)
    x[..., 0] = 1
    return layer, x


def test_what_has_no_room_is_counted_and_adds_nothing(device: torch.device) -> None:
    layer, x = crowded(device, capacity_factor=0.75)
    with no_host_sync(device):
        y, _ = layer(x)
    room = math.ceil(12 * K / E * 0.75)  # 5 of 12 tokens
    expected = torch.tensor([0, 12 - room, 0, 12 - room], device=device)
    assert torch.equal(layer.overflow_per_expert, expected)
    assert torch.equal(layer.router.tokens_per_expert, torch.tensor([0, 12, 0, 12], device=device))
    assert int(overflowed_tokens(layer)) == 14
    whole, _ = dropless(layer, x)
    rows, wholes = y.flatten(0, 1), whole.flatten(0, 1)
    torch.testing.assert_close(rows[:room], wholes[:room])  # the first ones of the batch
    assert not rows[room:].any()
    y, _ = layer.eval()(x)
    torch.testing.assert_close(y, whole)
    assert int(overflowed_tokens(layer)) == 14, "evaluation counts nothing"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_torch_counts_once(device: torch.device, use_reentrant: bool) -> None:
    counted = []
    for checkpoints in (False, True):
        layer, x = crowded(device, capacity_factor=0.75)
        x.requires_grad_()
        if checkpoints:
            y, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
        else:
            y, _ = layer(x)
        y.sum().backward()
        counted.append([layer.router.tokens_per_expert, layer.overflow_per_expert])
    assert int(counted[0][1].sum()) == 14
    assert all(map(torch.equal, *counted))


def poisoned(model: nn.Module, *batch: Tensor) -> Tensor:
    before = overflowed_tokens(model)
    loss: Tensor = model(*batch)
    return loss * torch.where(overflowed_tokens(model) > before, torch.nan, 1.0)


def test_an_overflow_can_leave_the_step_out(device: torch.device) -> None:
    """A batch of equal tokens, which all want the same experts, has no room; others have."""
    model = MixedModel(capacity_factor=1.9).to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    with graphfsdp.capture(model, optimizer, loss_fn=poisoned, skip_nonfinite=True) as step:
        overflows = []
        for call in range(16):
            tokens, targets = (part.to(device) for part in tokens_of(6, generator))
            if call in (1, 6, 9, 15):
                tokens = torch.zeros_like(tokens)
            before = [*model.parameters(), overflowed_tokens(model)]
            before = [tensor.detach().clone() for tensor in before]
            step(tokens, targets)
            overflows.append(bool(overflowed_tokens(model) > before.pop()))
            assert all(map(torch.equal, before, model.parameters())) == overflows[-1], call
        assert all(overflows[call] for call in (1, 6, 9, 15))
        assert step.skipped_steps is not None
        assert float(step.skipped_steps) == sum(overflows) < 16


@torch.no_grad()
def test_the_auxiliary_loss_is_that_of_sequences() -> None:
    """So it does not depend on how they are cut into batches; equally busy experts give 1."""
    router = Router(C, E, topk=K, aux_loss_coeff=0.5)
    x = torch.randn(4, 7, C)
    weights, _, counts, aux_loss = router(x)
    parts = torch.stack([router(part)[3] for part in x.split(1)])
    torch.testing.assert_close(aux_loss, parts.mean())
    torch.testing.assert_close(weights.sum(-1), torch.ones(28))
    assert int(counts.sum()) == 28 * K
    router.gate.weight.zero_()
    assert float(router(x)[3]) == 0.5


def test_the_bias_moves_tokens_to_idle_experts() -> None:
    """It counts for the choice alone; the weights are those of the scores."""
    layer, x = crowded(torch.device("cpu"), bias_update_rate=0.25)
    router = layer.router
    first_weights = router(x)[0]
    for call in range(12):
        layer(x)
        layer.end_iteration()
        if call == 0:
            expected = torch.tensor([0.25, -0.25, 0.25, -0.25])
            assert torch.equal(router.expert_bias, expected)
    chosen = set(router(x)[1].unique().tolist())
    assert chosen != {1, 3}
    assert bool((first_weights.sum(-1) - 1).abs().max() < 1e-6)
    assert layer.bfloat16().router.expert_bias.dtype == torch.float32
    # It keeps its place in checkpoints, and counts do not.
    buffers = layer.state_dict().keys() - dict(layer.named_parameters()).keys()
    assert buffers == {"router.expert_bias"}


def test_autocast_reaches_experts_but_not_the_router(device: torch.device) -> None:
    layer, x = crowded(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, _ = layer(x)
        weights = layer.router(x)[0]
    assert weights.dtype == y.dtype == torch.float32
    exact, _ = layer(x)
    assert not torch.equal(y, exact)
    torch.testing.assert_close(y, exact, rtol=0.05, atol=0.05)


def make(**options: Any) -> MoE:
    return MoE(C, **{"ffn_hidden_size": 64, "num_experts": E, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make(topk=5), "topk must be at most num_experts 4"),
        (lambda: make(topk=0), "topk must be an integer of at least 1"),
        (lambda: make(capacity_factor=0.0), "capacity_factor must be greater than 0"),
        (lambda: make(score_function="relu"), "score_function must be 'softmax' or 'sigmoid'"),
        (lambda: make(aux_loss_coeff=-1.0), "aux_loss_coeff must be at least 0"),
        (lambda: make(bias_update_rate=math.nan), "bias_update_rate must be at least 0"),
        (lambda: make(ffn_hidden_size=0), "ffn_hidden_size must be an integer"),
        (lambda: Experts(C, C, 4, first=3, num_local=2), "experts 3 to 4 are not all of 0 to 3"),
        (lambda: overflowed_tokens(nn.Linear(2, 2)), r"no graphfsdp\.moe\.MoE"),
        (lambda: make()(torch.randn(C)), r"takes \[B, T, C\] or \[T, C\], got shape \(16,\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
    assert make(topk=1)(torch.randn(3, 0, C))[0].shape == (3, 0, C)


def test_meta_devices_and_materialize() -> None:
    with torch.device("meta"):
        model = MixedModel(bias_update_rate=0.01)
    graphfsdp.materialize(model, "cpu")
    generator = torch.Generator().manual_seed(0)
    assert model(*tokens_of(2, generator)).isfinite()
    assert model.head.weight.shape[0] == VOCABULARY
    assert int(overflowed_tokens(model)) == 0


NUM_CALLS = 14  # 4 that are not replays
# Adam's moments are float32: a rounding more or less is 2**-24 of an update, of about the rate.
TOLERANCE = NUM_CALLS * learning_rate(0) * 2**-24


BALANCED = {"aux_loss_coeff": 0.1, "bias_update_rate": 0.01}


@pytest.mark.parametrize(
    ("ranks", "num_expert_ranks", "strategy", "microbatches", "options"),
    [
        ("ranks1", 1, "optim_grads_params", 1, {"bias_update_rate": 0.01}),  # all experts
        ("ranks2", 2, "optim", 2, {**BALANCED, "recomputes": True, "score_function": "sigmoid"}),
        ("ranks2", 2, "optim_grads_params", 1, {"capacity_factor": 1.0}),
        ("ranks4", 2, "optim_grads_params", 3, BALANCED),
        ("ranks4", 2, "no_shard", 1, BALANCED),
    ],
    ids=str,
)
@on_ranks()
def test_experts_on_ranks_train_as_in_one_process(
    num_expert_ranks: int, strategy: str, microbatches: int, options: dict[str, Any]
) -> None:
    """Captured equals eager bit for bit, and one process up to rounding."""
    generator = torch.Generator().manual_seed(1)
    data = [tokens_of(12, generator) for _ in range(NUM_CALLS)]
    how: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": float("inf")}
    make = partial(experts_on_ranks, num_expert_ranks, strategy, **options)
    got = replayed_as_eager(make, data=list(map(my_part, data)), **how)
    overflow = sum(int(b.sum()) for name, b in got.buffers.items() if "overflow" in name)
    if options.get("capacity_factor") is not None:  # other ranks leave out other tokens
        assert overflow > 0
        return
    assert overflow == 0
    torch.manual_seed(0)
    model = MixedModel(**options).double().to(rank_device())
    whole = [[part.to(rank_device()) for part in batch] for batch in data]
    alone = train(model, adam(model), data=whole, scope="none", **how)
    for mine, expected in zip(got.losses, alone.losses, strict=True):
        dist.all_reduce(mine, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mine, expected, rtol=0, atol=TOLERANCE)
    for name, expected in alone.params.items():
        torch.testing.assert_close(got.params[name], expected, rtol=0, atol=TOLERANCE)
    for name, expected in alone.buffers.items():
        counts = got.buffers[name]
        if "bias" not in name:
            dist.all_reduce(counts)
        assert torch.equal(counts, expected), name


@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"])
@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {"capacity_factor": 2.6}), (torch.bfloat16, {})], ids=str
)
@on_ranks()
def test_experts_of_other_ranks_have_the_bits_of_dropless_ones(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """Each expert has the same rows in the same order, so that its bits are the same too."""
    torch.manual_seed(0)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    alone = MoE(24, 64, 8, topk=3).to(rank_device(), dtype)
    torch.manual_seed(0)
    layer = MoE(24, 64, 8, topk=3, expert_group=dist.group.WORLD, **options)
    layer = layer.to(rank_device(), dtype)
    for _ in range(3):
        x = torch.randn(num_ranks, 21, 24).to(rank_device(), dtype)
        grad = torch.randn_like(x)
        mine, whole = (part.clone().requires_grad_() for part in (x[rank : rank + 1], x))
        y, _ = layer(mine)
        expected, _ = dropless(alone, whole)
        y.backward(grad[rank : rank + 1])
        expected.backward(grad)
        got_by_all: Any = whole.grad
        pairs: list[tuple[Any, Any]] = [
            (y, expected[rank : rank + 1]),
            (mine.grad, got_by_all[rank : rank + 1]),
        ]
        first = layer.experts.first
        for name, param in layer.experts.named_parameters():
            everyone = getattr(alone.experts, name)
            pairs.append((param.grad, everyone.grad[first : first + param.shape[0]]))
        for found, wanted in pairs:
            assert_same_sums(found, wanted)
        for param in itertools.chain(layer.parameters(), alone.parameters()):
            param.grad = None
    assert int(overflowed_tokens(layer)) == 0


@on_ranks("ranks2")
def test_experts_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="the 2 ranks of expert_group do not divide the 3 exp"):
        MoE(8, 64, 3, expert_group=dist.group.WORLD)
