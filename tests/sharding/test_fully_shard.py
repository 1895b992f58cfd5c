"""The loops, methods and parameters that FSDP2 users know, eagerly and in a captured iteration.

And what torch has beside it: torch.compile of units, before or after; context parallelism, where
each rank has a part of each sequence, and which torch has on GPUs only.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphfsdp
from counting_net import mean_square
from everyday_scripts import Tower
from graphfsdp import GuardError
from graphfsdp.optim import FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig
from ranks import on_ranks, rank_device
from recomputing_models import Recomputing
from sharding_helpers import (
    ATOL,
    RTOL,
    VOCABULARY,
    Net,
    Training,
    adam,
    assert_equal_tensors,
    assert_same_training,
    batches,
    full_gradients,
    full_parameters,
    hybrid_mesh,
    make_net,
    my_part,
    raises_on_rank,
    replayed_as_eager,
    shard,
    train,
)
from stand_in_compilers import compiling_models_by

NUM_STEPS = 5


def everything_between_steps(**options: Any) -> list[Tensor]:
    """Whatever may leave or find whole weights, before and after steps of the optimizer."""
    model: Any = make_net("optim_grads_params", **options)
    optim = adam(model)
    seen: list[Tensor] = []
    for batch in batches(NUM_STEPS):
        part = my_part(batch)
        seen.append(model(*part).detach())  # no backward pass follows, which would drop weights
        for half in range(2):
            model.set_is_last_backward(half == 1)
            loss = model(*(rows[half::2] for rows in part))
            with torch.no_grad():
                seen.append(model(*part))  # between a forward pass and its backward
            loss.backward()
        seen.append(model(*part).detach())
        optim.step()
        optim.zero_grad()
        seen.append(model(*part).detach())
        with torch.no_grad():
            next(model.parameters()).mul_(0.9)
        seen.append(model(*part).detach())
        seen += [value.full_tensor() for value in model.state_dict().values()]
        model.unshard()
        seen += [model(*part).detach(), *(param.detach().clone() for param in model.parameters())]
        model.reshard()
    return [*seen, *full_parameters(model).values()]


@on_ranks("ranks2")
def test_a_root_that_is_kept_is_never_older_than_its_shards() -> None:
    expected = everything_between_steps(reshard_after_forward=True)
    for before, after in ((3, 4), (4, 5)):  # the optimizer, and a write, have changed the weights
        assert not torch.equal(expected[before], expected[after])
    assert_equal_tensors(expected, everything_between_steps())
    assert_equal_tensors(expected, everything_between_steps(overlap=False))


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
@on_ranks("ranks2")
def test_an_optimizer_made_before_keeps_its_groups(name: str) -> None:
    results = []
    for first in (True, False):
        model = make_net(None if first else "optim_grads_params")
        optim = adam(model, name)
        params = optim.param_groups[0]["params"]
        others = [param for param in params if param.dim() <= 1]
        optim.param_groups[0]["params"] = [param for param in params if param.dim() > 1]
        optim.add_param_group({"params": others, "weight_decay": 0.0})
        numbers = [len(group["params"]) for group in optim.param_groups]
        if first:
            shard(model, "optim_grads_params")
        with graphfsdp.capture(model, optim) as step:
            for batch in batches(6):
                step(*my_part(batch))
        assert [len(group["params"]) for group in optim.param_groups] == numbers
        assert [group["weight_decay"] for group in optim.param_groups] == [0.1, 0.0]
        assert all(isinstance(p, DTensor) for g in optim.param_groups for p in g["params"])
        results.append(full_parameters(model))
    assert_equal_tensors(*results)


NUM_CAPTURED = 8
# One that reduces at last, and one that reduces each time and gathers.
CAPTURED = pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])


def tower(strategy: str) -> Any:
    torch.manual_seed(0)
    return shard(Tower().to(rank_device()), strategy)


def inputs(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    (part,) = my_part((torch.randn(8, 8, generator=generator),))
    return part


def freezing_run(strategy: str, scope: str) -> Training:
    model = tower(strategy)
    model.blocks[1].requires_grad_(False)

    def batches_and_freezes() -> Iterator[tuple[Tensor]]:
        for index in range(12):
            if index == 4:
                model.blocks.requires_grad_(True)
                model.blocks[0][0].requires_grad_(False)
            elif index == 8:
                model.requires_grad_(False)
                model.blocks[2].requires_grad_(True)
            yield (inputs(index),)

    options: Any = {"scope": scope, "on_change": "recapture", "warmup_steps": 1}
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    return train(model, optim, data=batches_and_freezes(), loss_fn=mean_square, **options)


@CAPTURED
@on_ranks("ranks2")
def test_a_captured_step_follows_requires_grad(strategy: str) -> None:
    eager, captured = (freezing_run(strategy, scope) for scope in ("none", "full_iteration"))
    assert_same_training(eager, captured)
    assert captured.report.num_captures == 3


@on_ranks("ranks2")
def test_batches_that_skip_units_take_turns_with_others_as_they_like() -> None:
    """Units gather ahead in the order of the last pass, which is another kind's now and then."""
    data: Any = [(inputs(index), (0, 2) if index % 3 == 1 else ()) for index in range(22)]
    runs = []
    for scope in ("none", "full_iteration"):
        model = tower("optim_grads_params")
        options: Any = {"scope": scope, "on_change": "recapture", "audit": 2}
        options["loss_fn"] = lambda model, x, skipped: model(x, skipped=skipped).square().mean()
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(train(model, optim, data=data, **options))
    assert_same_training(*runs)
    assert runs[1].report.num_captures == 2  # audits, too, go by the order of their graph
    assert runs[1].report.num_calls["audit"] >= 4


def unshards(model: Any, optim: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        block.unshard()
    loss = mean_square(model, x)
    loss.backward()
    optim.step()
    return loss


def skips_a_unit_at_last(model: Any, optim: Any, x: Tensor) -> Tensor:
    with model.no_sync():
        first = mean_square(model, x[::2])
        first.backward()
    last = model(x[1::2], skipped=(0, 2)).square().mean()
    last.backward()
    optim.step()
    total: Tensor = first + last
    return total


@pytest.mark.parametrize("iteration", [unshards, skips_a_unit_at_last])
@CAPTURED
@on_ranks("ranks2")
def test_an_iteration_with_words_of_fsdp2(strategy: str, iteration: Callable[..., Any]) -> None:
    data = [(inputs(index),) for index in range(NUM_CAPTURED)]
    options: Any = {"iteration": iteration, "max_grad_norm": None, "data": data}
    got = replayed_as_eager(lambda: tower(strategy), num_steps=NUM_CAPTURED, **options)
    start = full_parameters(tower(strategy))
    assert not any(torch.equal(value, start[name]) for name, value in got.params.items())


@pytest.mark.parametrize("way", ["none", "block_torch", "block_reentrant", "part_ours"])
@on_ranks("ranks2")
def test_weights_that_are_unsharded_by_hand_train_wherever_they_are_used(way: str) -> None:
    """Where parts of their unit run again, and behind its forward pass, as in one process."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model: Any = Recomputing(way, dropout=0.0).to(rank_device(), torch.float64)
        if is_sharded:
            graphfsdp.fully_shard(model)
        for tokens, targets in batches(2):  # the second one's gradients are added
            if is_sharded:
                model.unshard()
            loss = model(tokens.to(rank_device()), targets.to(rank_device()))
            (loss + model.head.weight.square().sum()).backward()
        found.append(full_gradients(model))
    torch.testing.assert_close(*found, rtol=RTOL, atol=ATOL)


def returning_iteration(model: Any, optim: Any, x: Tensor) -> dict[str, Any]:
    optim.zero_grad()
    loss = mean_square(model, x)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optim.step()
    return {"norm": norm, "loss": loss, "grad": model.head.weight.grad, "nothing": None}


def returned(strategy: str, scope: str) -> list[Tensor]:
    """Also what lies unsharded in front of each call."""
    model = tower(strategy)
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
    return [*found, *full_parameters(model).values()]


@CAPTURED
@on_ranks("ranks2")
def test_a_captured_iteration_returns_dtensors(strategy: str) -> None:
    assert_equal_tensors(*(returned(strategy, scope) for scope in ("none", "full_iteration")))


def accumulated(strategy: str, *, by_hand: bool) -> list[Tensor]:
    """Train with two backward passes a step, whose gradients are reduced by hand, or by the last.

    By hand, one strategy keeps them since no pass is the last one, the other since it is told to.
    """
    model = tower(strategy)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_manual_backward_finalization(by_hand)
    found: list[Tensor] = []
    for index in range(4):
        model.set_requires_gradient_sync(strategy == "optim" if by_hand else index % 2 == 1)
        mean_square(model, inputs(index)).backward()
        if index % 2 == 0:
            continue
        if by_hand:
            assert all(param.grad is None for param in model.parameters())
            model.blocks[0].unshard()
            model.finalize_backward(async_op=True).wait()
            assert isinstance(model.blocks[0][0].weight, DTensor)  # resharded
        found += full_gradients(model).values()
        optim.step()
        optim.zero_grad()
    return [*found, *full_parameters(model).values()]


@CAPTURED
@on_ranks("ranks2")
def test_backward_passes_are_finalized_by_hand(strategy: str) -> None:
    runs = [accumulated(strategy, by_hand=by_hand) for by_hand in (False, True)]
    assert len(runs[0]) == 3 * len(list(tower(strategy).parameters()))
    assert_equal_tensors(*runs)


@on_ranks("ranks1")
def test_what_comes_waits_for_an_optimizer_that_steps_elsewhere() -> None:
    event = Mock(spec=torch.Event)
    tower("optim").set_post_optim_event(event)
    event.wait.assert_called_once_with()


def trained(model: nn.Module) -> Training:
    with warnings.catch_warnings():
        # torch.compile hides its own, which does not help where warnings are errors.
        warnings.simplefilter("ignore")
        return train(model, adam(model), scope="none", num_steps=4)


class Tracer:
    """Runs what torch.compile has traced as it is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of each graph, in operators

    def __call__(self, traced: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        calls = ("call_function", "call_method", "call_module")
        self.sizes.append(sum(node.op in calls for node in traced.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(traced, example)


def compiled_net(strategy: str, when: str, backend: Any, *, recompute: bool = False) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a GPU it imports Inductor, of which torch warns
        torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    if recompute:
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    for block in model.blocks if when == "before" else ():
        block.compile(backend=backend)
    shard(model, strategy)
    for module in {"after": [*model.blocks], "the model": [model]}.get(when, []):
        module.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    ("strategy", "when", "recompute"),
    [
        ("optim", "after", False),
        ("optim_grads_params", "before", False),
        ("optim_grads_params", "the model", False),
        ("optim_grads_params", "before", True),
    ],
)
@on_ranks("ranks2")
def test_compiled_units_train_as_eager_ones_do(strategy: str, when: str, recompute: bool) -> None:
    """A unit's own forward is one graph, whatever gathers and frees its weights around it."""
    tracer = Tracer()
    expected, got = (
        trained(compiled_net(strategy, each, tracer, recompute=recompute))
        for each in ("never", when)
    )
    assert_same_training(expected, got)
    if not recompute:
        assert [size for size in tracer.sizes if size > 3] == [6, 5], tracer.sizes


class Residual(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).relu()


@on_ranks("ranks1")
def test_equal_blocks_are_one_graph() -> None:
    """Torch.compile runs blocks as they are once it has compiled their forward eight times."""
    tracer = Tracer()
    model = nn.Sequential(*(Residual(4, 4) for _ in range(12)))
    for block in model:
        block.compile(backend=tracer)
        graphfsdp.fully_shard(block)
    graphfsdp.fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in trained()
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert tracer.sizes == [3]
    assert all(type(block) is type(model[0]) for block in model)


@on_ranks("ranks1")
def test_compiled_autograd_is_refused() -> None:
    """It calls nobody when a backward pass is over: gradients came with those of the next one."""
    model = graphfsdp.fully_shard(nn.Linear(4, 4))
    with warnings.catch_warnings(), torch._dynamo.config.patch(compiled_autograd=True):
        warnings.simplefilter("ignore")  # as in trained()

        @torch.compile(backend="eager")
        def backward(loss: Tensor) -> None:
            loss.backward()

        with raises_on_rank(graphfsdp.ConfigError, "compiled autograd", "Remedy"):
            backward(model(torch.randn(2, 4)).sum())


@pytest.mark.gpu
@on_ranks("gpu_ranks")
def test_a_captured_step_compiles_units_and_gathers_around_them() -> None:
    tracer = Tracer()
    with compiling_models_by(tracer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        for strategy in ("optim", "optim_grads_params"):
            replayed_as_eager(lambda: make_net(strategy, dropout=0.2), compile=True)  # noqa: B023
    assert [size for size in tracer.sizes if size > 3] == [6, 5]  # both strategies by the same


NUM_PARTED, LENGTH = 7, 16
SHAPE = GPTConfig(
    vocab_size=VOCABULARY, seq_length=LENGTH, num_layers=2, hidden_size=32, num_attention_heads=2
)


def parted_model(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # Half precision: attention's kernels.
    model: Any = GPT(SHAPE).to(rank_device(), torch.bfloat16)
    shard(model, "optim_grads_params", mesh=mesh)
    return model, FusedAdam(model.parameters(), lr=1e-2)


def sequences() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(VOCABULARY, (NUM_PARTED, 2, 2, LENGTH), generator=generator)
    return [[tokens.clone().to(rank_device()) for tokens in batch] for batch in drawn]


@contextmanager
def parted(mesh: DeviceMesh, batch: Sequence[Tensor]) -> Iterator[None]:
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    cut = context_parallel(
        mesh, buffers=list(batch), buffer_seq_dims=[1] * len(batch), no_restore_buffers={*batch}
    )
    with cut, sdpa_kernel(kernels):
        yield


@pytest.mark.gpu
@pytest.mark.multi_gpu
@on_ranks("gpu_ranks")
def test_captured_parts_of_sequences_train_as_a_plain_loop() -> None:
    mesh = hybrid_mesh((dist.get_world_size(),), ("cp",))
    model, optimizer = parted_model(mesh)
    cut, losses = [], []
    for batch in sequences():
        with parted(mesh, batch):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        cut.append(batch)
    expected = full_parameters(model)
    for scope in ("none", "full_iteration"):
        model, optimizer = parted_model(mesh)
        # Entered once: whoever enters replaces torch's attention by a new function.
        with (
            parted(mesh, [torch.zeros(1, LENGTH, device=rank_device())]),
            graphfsdp.capture(model, optimizer, scope=scope) as step,
        ):
            got = [step(*batch) for batch in cut]
            assert step.phase.value == ("eager" if scope == "none" else "replay")
        assert all(torch.equal(a, b) for a, b in zip(got, losses, strict=True))
        for name, weight in full_parameters(model).items():
            assert torch.equal(weight, expected[name]), name
    # Attention that is replaced in each iteration is refused.
    model, optimizer = parted_model(mesh)
    with graphfsdp.capture(model, optimizer) as step:
        *first, last = sequences()
        for batch in first[:4]:
            with parted(mesh, batch):
                step(*batch)
        with parted(mesh, last), raises_on_rank(GuardError, "scaled_dot_product_attention"):
            step(*last)
