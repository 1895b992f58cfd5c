"""Hooks of gradients on sharded parameters see what all ranks have reduced, in a graph too."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import graphfsdp
from ranks import on_ranks, rank_device
from sharding_helpers import (
    STRATEGIES,
    adam,
    assert_equal_tensors,
    full_parameters,
    hybrid_mesh,
    make_net,
    num_steps_of,
    on_meta,
    replayed_as_eager,
    train,
)

WIDTH = 8
NUM_MICROBATCHES = 3


def make(strategy: str | None, *, meta: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)

    def stack() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double()

    model: Any = on_meta(stack) if meta else stack().to(rank_device())
    if strategy is not None:
        for layer in (model[0], model[2], model):
            graphfsdp.fully_shard(layer, strategy=strategy, **options)
    return model


def squash(grad: Tensor) -> Tensor:
    """What is no sum over microbatches, and differs in each element."""
    return torch.tanh(grad * 3)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    return found.clone()


def hooked_run(strategy: str | None, *, accumulates: bool, **options: Any) -> list[Any]:
    """Return what hooks have seen, and the weights that they have stepped on, whole."""
    model = make(strategy, **options)
    seen: list[Any] = []
    if options.get("meta"):
        model.to_empty(device=rank_device())
        for mine, other in zip(model.parameters(), make(None).parameters(), strict=True):
            value = DTensor.from_local(other.detach(), mine.device_mesh, [Replicate()])
            mine.detach().copy_(value)

    def log(name: str, grad: Tensor) -> Tensor:
        seen.append((name, "gradient", whole(grad)))
        return squash(grad)

    def step(name: str, param: Any) -> None:
        seen.append((name, "accumulated", whole(param.grad)))
        if not accumulates:
            param.add_(param.grad, alpha=-0.1)
            param.grad = None

    for name, param in model.named_parameters():
        if name != "2.bias":
            param.register_hook(functools.partial(log, name))
        param.register_post_accumulate_grad_hook(functools.partial(step, name))
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_MICROBATCHES):
        x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64).to(rank_device())
        model(x).square().mean().backward()
    seen.sort(key=lambda entry: entry[0])  # units come in another order
    return [*seen, *((name, "weight", value) for name, value in full_parameters(model).items())]


def same_as_one_process(accumulates: bool, several: list[dict[str, Any]]) -> None:
    """On the same batch on each rank: so what is reduced is what one process has."""
    expected = hooked_run(None, accumulates=accumulates)
    for options in several:
        axes: dict[str, Any] = {"mesh": hybrid_mesh()} if "outer_strategy" in options else {}
        got = hooked_run(**axes, **options, accumulates=accumulates)
        assert [entry[:2] for entry in got] == [entry[:2] for entry in expected]
        for (*what, mine), (*_, theirs) in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14, msg=f"{what}")


ONE_AXIS = [
    {"strategy": strategy, **options}
    for strategy in STRATEGIES
    for options in ({}, {"overlap": False}, {"meta": True})
]
TWO_AXES = [
    {"strategy": "optim_grads_params", "outer_strategy": outer} for outer in ("no_shard", "optim")
]


@pytest.mark.parametrize(
    ("ranks", "accumulates", "several"),
    [("ranks2", False, ONE_AXIS), ("ranks2", True, ONE_AXIS), ("ranks4", True, TWO_AXES)],
)
def test_hooks_see_what_all_ranks_have_reduced(
    request: pytest.FixtureRequest, ranks: str, accumulates: bool, several: list[dict[str, Any]]
) -> None:
    request.getfixturevalue(ranks).run(same_as_one_process, accumulates, several)


def clipping_net(strategy: str) -> nn.Module:
    model = make_net(strategy, dtype=torch.float64)
    for param in model.parameters():
        if param.requires_grad:
            param.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
            param.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_hooks_in_a_graph(strategy: str) -> None:
    num_steps = num_steps_of(strategy, "optim_grads_params")
    for microbatches in (1, 3):
        options: dict[str, Any] = {"num_steps": num_steps, "microbatches": microbatches}
        got = replayed_as_eager(lambda: clipping_net(strategy), **options)
        plain = make_net(strategy, dtype=torch.float64)
        unhooked = train(plain, adam(plain), **options)
        assert any(not torch.equal(got.params[n], unhooked.params[n]) for n in got.params)


def stepping_in_backward(model: Any, optimizers: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks("ranks2")
def test_optimizers_that_step_in_backward_are_captured(strategy: str) -> None:
    runs = []
    for scope in ("none", "full_iteration"):
        model = make(strategy)
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(param: Any, optimizers: Any = optimizers) -> None:
            optimizers[param].step()
            param.grad = None

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        generator = torch.Generator().manual_seed(1)
        options: Any = {"iteration": stepping_in_backward, "scope": scope}
        losses = []
        with graphfsdp.capture(model, [*optimizers.values()], **options) as captured:
            for _ in range(num_steps_of(strategy, "optim_grads_params")):
                x = torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)
                losses.append(captured(x.to(rank_device())))
            if scope != "none":
                assert captured.report().num_captures == 1
        assert losses[-1] != losses[0]
        runs.append([*losses, *full_parameters(model).values()])
    assert_equal_tensors(*runs)
