"""What FSDP2's users do every day: the same scripts with torch's ``fully_shard`` and with ours."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import graphfsdp
from counting_net import mean_square
from graphfsdp.base.collectives import all_gather_
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    Training,
    assert_equal_tensors,
    buffers,
    full_parameters,
    my_part,
    replayed_as_eager,
    units,
)

NUM_STEPS = 6
NUM_CAPTURED = 8
WIDTH = 8
# One that reduces at last, and one that reduces each time and gathers; the others run eagerly.
CAPTURED = ("optim", "optim_grads_params")


class Tower(nn.Module):
    """Blocks that are units; each call may leave some of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in skipped:
                x = x + block(x)
        out: Tensor = self.head(x)
        return out


def tower(shard: Callable[..., Any] | None) -> Any:
    torch.manual_seed(0)
    model = Tower().to(rank_device())
    if shard is not None:
        for block in model.blocks:
            shard(block)
        shard(model)
    return model


def inputs(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    (part,) = my_part((torch.randn(8, WIDTH, generator=generator),))
    return part


def assert_close_parameters(expected: nn.Module, got: nn.Module, whose: str = "") -> None:
    """Compare trained weights: both reduce in float32, over two ranks, in the same order."""
    theirs, ours = full_parameters(expected), full_parameters(got)
    assert list(theirs) == list(ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=f"{whose} {name}")


def sharding(strategy: str) -> Callable[..., Any]:
    return functools.partial(graphfsdp.fully_shard, strategy=strategy)


def assert_trains_as_torchs(run: Callable[..., Any], **options: Any) -> None:
    """Compare what a run makes of a model with each strategy with torch's fully_shard."""
    expected = run(torch_fully_shard, **options)
    for strategy in STRATEGIES:
        assert_close_parameters(expected, run(sharding(strategy), **options), strategy)


def set_trained(model: Any, index: int) -> None:
    """A schedule: layers, and whole units, freeze and thaw."""
    model.requires_grad_(True)
    model.blocks[0].requires_grad_(index % 3 == 1)
    model.blocks[1][2].weight.requires_grad_(index % 2 == 0)
    model.head.bias.requires_grad_(index >= 2)


def freezing_run(shard: Callable[..., Any], *, frozen_first: bool) -> Any:
    model = tower(None)
    if frozen_first:
        model.blocks.requires_grad_(False)
    for block in model.blocks:
        shard(block)
    shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(NUM_STEPS):
        set_trained(model, index)
        model(inputs(index)).square().mean().backward()
        for name, param in model.named_parameters():
            assert (param.grad is not None) == param.requires_grad, (index, name)
        optim.step()
        optim.zero_grad()
    return model


@pytest.mark.parametrize("frozen_first", [False, True])
@on_ranks("ranks2")
def test_what_is_trained_is_what_requires_grad_says(frozen_first: bool) -> None:
    """Parameters that freeze and thaw after fully_shard, as in plain torch."""
    assert_trains_as_torchs(freezing_run, frozen_first=frozen_first)


def change_trained(model: Any, index: int) -> None:
    if index == 0:
        model.blocks[1].requires_grad_(False)
    elif index == 4:
        model.blocks.requires_grad_(True)
        model.blocks[0][0].requires_grad_(False)
    elif index == 8:
        model.requires_grad_(False)
        model.blocks[2].requires_grad_(True)


def captured_freezing(strategy: str, scope: str) -> Any:
    model = tower(sharding(strategy))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    change_trained(model, 0)
    options: Any = {"scope": scope, "on_change": "recapture", "warmup_steps": 1}
    with graphfsdp.capture(model, optim, loss_fn=mean_square, **options) as step:
        for index in range(12):
            change_trained(model, index)
            step(inputs(index))
        if scope != "none":
            assert step.report().num_captures == 3
    return model


@pytest.mark.parametrize("strategy", CAPTURED)
@on_ranks("ranks2")
def test_a_captured_step_follows_requires_grad(strategy: str) -> None:
    runs = [captured_freezing(strategy, scope) for scope in ("none", "full_iteration")]
    assert_equal_tensors(*map(full_parameters, runs))
    model = tower(torch_fully_shard)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(12):
        change_trained(model, index)
        mean_square(model, inputs(index)).backward()
        optim.step()
        optim.zero_grad()
    assert_close_parameters(model, runs[1])


def prefetching_run(shard: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
    model = tower(shard)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    for index in range(NUM_STEPS):
        for block in model.blocks:
            block.unshard()
        if index % 2:
            model.unshard()
        model(inputs(index), skipped=[index % 3]).square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor())
        optim.step()
        optim.zero_grad()
    return model, norms


@on_ranks("ranks2")
def test_unshard_without_reshard_lasts_until_backward_is_over() -> None:
    """Also in the first iteration, and in units that did not run."""
    theirs, their_norms = prefetching_run(torch_fully_shard)
    for strategy in STRATEGIES:
        ours, our_norms = prefetching_run(sharding(strategy))
        for expected, got in zip(their_norms, our_norms, strict=True):
            assert expected > 0
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=strategy)
        assert_close_parameters(theirs, ours, strategy)


def replayed_in_a_graph(strategy: str, iteration: Callable[..., Tensor]) -> Training:
    data = [(inputs(index),) for index in range(NUM_CAPTURED)]
    options: Any = {"iteration": iteration, "max_grad_norm": None, "data": data}
    return replayed_as_eager(lambda: tower(sharding(strategy)), num_steps=NUM_CAPTURED, **options)


def unsharding_iteration(model: Any, optim: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        block.unshard()
    loss = mean_square(model, x)
    loss.backward()
    optim.step()
    return loss


@pytest.mark.parametrize("strategy", CAPTURED)
@on_ranks("ranks2")
def test_unshard_inside_a_captured_iteration(strategy: str) -> None:
    got = replayed_in_a_graph(strategy, unsharding_iteration)
    assert len({float(loss) for loss in got.losses}) == NUM_CAPTURED


def pipelined_run(shard: Callable[..., Any], *, unshards: bool) -> Any:
    """One forward, one backward: what the test of FSDP2 does."""
    model = tower(shard)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for index in range(3):
        if unshards:
            for block in model.blocks:
                block.unshard()
        for part in range(3):
            last = part == 2
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            model(inputs(3 * index + part)).square().mean().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        optim.step()
        optim.zero_grad()
    return model


@pytest.mark.parametrize("unshards", [False, True])
@on_ranks("ranks2")
def test_one_forward_one_backward_keeps_weights(unshards: bool) -> None:
    assert_trains_as_torchs(pipelined_run, unshards=unshards)


@on_ranks("ranks2")
def test_weights_that_backward_keeps_are_gathered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def count(*args: Any, **options: Any) -> None:
        counted.append(args)
        all_gather_(*args, **options)

    monkeypatch.setattr("graphfsdp.sharding.buffer.all_gather_", count)
    options: dict[str, Any] = {"strategy": "optim_grads_params", "reshard_after_forward": False}
    model = pipelined_run(functools.partial(graphfsdp.fully_shard, **options), unshards=False)
    assert len(units(model)) == 4 <= len(buffers(model))
    assert len(counted) == 3 * len(buffers(model))  # in three iterations


def skipping_run(shard: Callable[..., Any], *, last: Sequence[int]) -> Any:
    model = tower(shard)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(NUM_STEPS):
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            skipped = last if part == 2 else ()
            model(inputs(3 * index + part), skipped=skipped).square().mean().backward()
        assert all(param.grad is not None for param in model.parameters())
        optim.step()
        optim.zero_grad()
    return model


@pytest.mark.parametrize("last", [(0,), (0, 1, 2)])
@on_ranks("ranks2")
def test_the_last_microbatch_may_skip_a_unit(last: tuple[int, ...]) -> None:
    assert_trains_as_torchs(skipping_run, last=last)


def skipping_iteration(model: Any, optim: Any, x: Tensor) -> Tensor:
    with model.no_sync():
        first = mean_square(model, x[::2])
        first.backward()
    last = model(x[1::2], skipped=(0, 2)).square().mean()
    last.backward()
    optim.step()
    total: Tensor = first + last
    return total


@pytest.mark.parametrize("strategy", CAPTURED)
@on_ranks("ranks2")
def test_a_captured_iteration_may_skip_a_unit_at_last(strategy: str) -> None:
    got = replayed_in_a_graph(strategy, skipping_iteration)
    start = full_parameters(tower(None))
    assert not any(torch.equal(value, start[name]) for name, value in got.params.items())


class Generating(nn.Module):
    """Calls itself within a method that counts as a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        out: Tensor = torch.tanh(self.layer(x))
        return self(out) if again else out

    def generate(self, x: Tensor) -> Tensor:
        out: Tensor = self(self(x, again=True)) + self.layer(x)
        return out


@on_ranks("ranks2")
def test_a_unit_runs_inside_its_own_forward_pass() -> None:
    """As a model does whose ``generate`` is registered, and calls the model."""
    torch.manual_seed(0)
    alone = Generating().to(rank_device())
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model: Any = sharding(strategy)(Generating().to(rank_device()))
        graphfsdp.register_fsdp_forward_method(model, "generate")
        for net in (alone, model):
            net.zero_grad()
            mean = net.generate(inputs(dist.get_rank())).square().mean()
            (mean + net(inputs(1), again=True).sum()).backward()
        for param, whole in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(param, DTensor)
            expected: Any = whole.grad
            dist.all_reduce(expected)
            got: Any = param.grad
            torch.testing.assert_close(got.full_tensor(), expected / 2)


def returning_iteration(model: Any, optim: Any, x: Tensor) -> dict[str, Any]:
    optim.zero_grad()
    loss = mean_square(model, x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    return {"norm": norm, "loss": loss, "grad": model.head.weight.grad, "nothing": None}


def returned(strategy: str, scope: str) -> list[Tensor]:
    """Also what lies unsharded in front of each call."""
    model = tower(sharding(strategy))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    options: Any = {"scope": scope, "iteration": returning_iteration}
    found: list[Tensor] = []
    model.unshard()
    with graphfsdp.capture(model, optim, **options) as step:
        for index in range(NUM_CAPTURED):
            model.blocks[index % 3].unshard()
            kept = step(inputs(index))
            assert kept["nothing"] is None
            assert isinstance(kept["norm"], DTensor)
            found += [kept["norm"].full_tensor(), kept["loss"], kept["grad"].full_tensor()]
        if scope != "none":
            assert step.report().num_calls["replay"] == NUM_CAPTURED - 4
    return [*found, *full_parameters(model).values()]


@pytest.mark.parametrize("strategy", CAPTURED)
@on_ranks("ranks2")
def test_a_captured_iteration_returns_dtensors(strategy: str) -> None:
    assert_equal_tensors(*(returned(strategy, scope) for scope in ("none", "full_iteration")))


def policies() -> list[tuple[TorchPolicy, dict[str, Any]]]:
    """Return torch's policies with the words that say the same to ours."""
    bf16, fp32 = torch.bfloat16, torch.float32
    words: list[dict[str, Any]] = [
        {"param_dtype": bf16, "reduce_dtype": fp32},
        {"param_dtype": bf16, "reduce_dtype": fp32, "output_dtype": torch.float64},
        {"reduce_dtype": fp32, "cast_forward_inputs": False, "output_dtype": bf16},
    ]
    return [(TorchPolicy(**each), each) for each in words]


def precision_run(shard: Callable[..., Any], policy: Any) -> tuple[Any, Tensor]:
    model = tower(None)
    for block in model.blocks:
        shard(block, mp_policy=dataclasses.replace(policy, output_dtype=None))
    shard(model, mp_policy=policy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(3):
        model.set_modules_to_forward_prefetch(list(model.blocks))
        model.set_modules_to_backward_prefetch(list(model.blocks))
        model.set_unshard_in_backward(True)
        model.set_is_last_backward(True)
        model.unshard(async_op=True).wait()
        output = model(inputs(index))
        output.square().mean().backward()
        optim.step()
        optim.zero_grad()
    return model, output.detach()


@pytest.mark.parametrize("which", range(3))
@on_ranks("ranks2")
def test_the_words_of_fsdp2s_precision(which: int) -> None:
    theirs, words = policies()[which]
    expected, expected_output = precision_run(torch_fully_shard, theirs)
    for policy in (theirs, graphfsdp.MixedPrecisionPolicy(**words)):
        got, output = precision_run(graphfsdp.fully_shard, policy)
        assert output.dtype == expected_output.dtype
        assert output.dtype == (words.get("output_dtype") or words["param_dtype"])
        torch.testing.assert_close(output, expected_output, rtol=1e-2, atol=1e-3)
        assert_close_parameters(expected, got)
