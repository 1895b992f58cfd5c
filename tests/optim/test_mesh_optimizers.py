"""Optimizers of parameters that ranks share: ours step as on whole ones, torch's on two meshes.

And Muon, which needs whole matrices.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphfsdp
from adam_helpers import (
    copies_of,
    grad_of,
    load_in_place,
    make_groups,
    make_muon,
    make_params,
    make_twins,
    set_grads,
    take_steps,
)
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam, Muon
from helpers import local_part
from parallel_models import TP_AXES, part_of_axis, plain_model, tensor_parallel, whole_batches
from parts_helpers import make_adam
from ranks import on_ranks, rank_device
from sharding_helpers import (
    full_parameters,
    hybrid_mesh,
    make_net,
    replayed_as_eager,
)

Make = Callable[[nn.Module], torch.optim.Optimizer]
CLIP = {"skip_nonfinite": True, "max_grad_norm": 0.5}
BAD_STEP = 1


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        (CLIP, torch.float32),
        ({"amsgrad": True, **CLIP}, torch.float32),
        ({"weight_decay": 0.1, "master_weights": True}, torch.bfloat16),
    ],
)
@on_ranks("ranks2")
def test_ranks_step_as_one(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """By norm, clipping and skip too, where rows do not divide: a rank holds less, or nothing."""
    mesh = hybrid_mesh((dist.get_world_size(),), ("all",))

    def cut(tensor: Tensor) -> Any:
        return distribute_tensor(tensor.detach(), mesh, [Shard(0)])

    wholes = make_params([(7, 3), (5,), (1, 4)], dtype, rank_device())
    parts = [nn.Parameter(cut(whole)) for whole in wholes]
    ours, expected = (FusedAdam(params, lr=0.1, **settings) for params in (parts, wholes))
    for step in range(5):
        is_bad = step == BAD_STEP and "skip_nonfinite" in settings
        set_grads(wholes)
        if is_bad:
            grad_of(wholes[0])[6, 2] = math.nan  # on the last rank alone
        for part, whole in zip(parts, wholes, strict=True):
            part.grad = cut(grad_of(whole))
        ours.step()
        expected.step()
        norm, other = (each.control.grad_norm for each in (ours, expected))
        torch.testing.assert_close(norm, other, rtol=1e-6, atol=0, equal_nan=True)
        assert bool(norm.isfinite()) == (not is_bad)
        skipped = int("skip_nonfinite" in settings and step >= BAD_STEP)
        assert ours.control.skipped_steps.item() == skipped
    for part, whole in zip(parts, wholes, strict=True):
        state, other_state = ours.state[part], expected.state[whole]
        assert state.keys() == other_state.keys()
        pairs: list[Any] = [(part.detach(), whole.detach())]
        pairs += [(state[key], other_state[key]) for key in state if key != "step"]
        for mine, tensor in pairs:
            rtol = 2.0**-7 if tensor.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(mine.full_tensor(), tensor, rtol=rtol, atol=1e-6)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return whole weights after steps along gradients that each element decides for itself."""
    for index in range(3):
        for param in model.parameters():
            if param.requires_grad:
                param.grad = param.detach().clone()
                local_part(param.grad).mul_(7).add_(index).sin_()
        optimizer.step()
    return full_parameters(model)


PAIRS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "tensor": lambda: (tensor_parallel(), plain_model()),
    "repeated": lambda: (make_net("optim_grads_params", outer_strategy="no_shard"), make_net(None)),
    "cut": lambda: (make_net("optim", outer_strategy="optim"), make_net(None)),
}


@pytest.mark.parametrize("kind", PAIRS)
@on_ranks("ranks4")
def test_muon_finds_whole_tensors_over_all_axes(kind: str) -> None:
    got, expected = (
        stepped(model, make_muon(model.parameters(), lr=0.02)) for model in PAIRS[kind]()
    )
    for name, whole in expected.items():
        bound = 1e-10 if whole.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got[name], whole, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["tensor", "hybrid"])
@on_ranks("ranks4")
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(kind: str) -> None:
    parts: Any = whole_batches()[:6]
    if kind == "tensor":
        mesh = hybrid_mesh((2, 2), TP_AXES)
        parts = [part_of_axis(batch, mesh, "dp") for batch in parts]
        model = tensor_parallel()
        bad = mesh.get_local_rank("dp") == 1
    else:
        model = make_net("optim_grads_params", outer_strategy="optim")
        bad = dist.get_rank() == 3

    def loss_fn(model: Any, tokens: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets) * factor
        return loss

    optimizer = FusedAdam([param for param in model.parameters() if param.requires_grad], lr=0.02)
    options: dict[str, Any] = {"loss_fn": loss_fn, "skip_nonfinite": True, "warmup_steps": 2}
    with graphfsdp.capture(model, optimizer, **options) as step:
        for index, part in enumerate(parts):
            before = full_parameters(model)
            step(*part, torch.tensor(math.inf if bad and index == 4 else 1.0))  # in a replay
            is_same = all(map(torch.equal, before.values(), full_parameters(model).values()))
            assert is_same == (index == 4)
        assert step.skipped_steps is not None
        assert step.skipped_steps.item() == 1


def partly_cut() -> nn.Module:
    """Return a model with DTensors on a tp axis, and plain parameters beside them."""
    mesh = hybrid_mesh((2, 2), TP_AXES)
    model = plain_model()
    blocks: Any = model.blocks
    for block in blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
    loss: Tensor = model(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


@on_ranks("ranks4")
def test_plain_parameters_beside_cut_ones_work_or_are_refused_with_a_remedy() -> None:
    mesh = hybrid_mesh((2, 2), TP_AXES)
    data = [part_of_axis(batch, mesh, "dp") for batch in whole_batches()]
    model = partly_cut()
    with (
        graphfsdp.capture(model, make_adam(model), iteration=clipping) as step,
        pytest.raises(RuntimeError, match="DTensor"),  # of torch\'s own clipping
    ):
        step(*data[0])
    lists = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ConfigError, match=r"fused=True and parameters on several .*fused=False"):
        graphfsdp.capture(model, lists)
    got = replayed_as_eager(partly_cut, make_adam, data=data, max_grad_norm=0.5)
    assert got.losses[-1] < got.losses[0]


SHAPES: list[tuple[int, ...]] = [(20, 10), (7, 16), (5, 5), (1, 3)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_nesterov": {"nesterov": False, "weight_decay": 0.0},
    "adamw_rms": {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8, "ns_steps": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_torch(device: torch.device, name: str) -> None:
    """And of a group without Muon those of AdamW."""
    params, twins = make_twins([*SHAPES, (4,), (2, 3, 4)], device=device)
    num = len(SHAPES)
    adamw: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1}
    rest = {"params": params[num:], "use_muon": False, **adamw}
    ours = Muon(make_groups({"params": params[:num]}, rest), lr=0.02, **SETTINGS[name])
    theirs = torch.optim.Muon(twins[:num], lr=0.02, **SETTINGS[name])
    others = torch.optim.AdamW(twins[num:], **adamw)
    for step in range(20):
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.02 / (1 + step)
        set_grads(params, twins)
        for optimizer in (ours, theirs, others):
            optimizer.step()
    for param, twin in zip(params[:num], twins[:num], strict=True):
        # The directions are bfloat16: a rounding to the other side is 2**-8 of an entry, and the
        # iteration, whose slope is up to 3.4 a step, enlarges it. The path is 20 steps long.
        path = 0.02 * sum(1 / (1 + step) for step in range(20)) * 0.2 * max(param.shape) ** 0.5
        torch.testing.assert_close(param, twin, rtol=0, atol=0.05 * path)
        buffers = ours.state[param]["momentum_buffer"], theirs.state[twin]["momentum_buffer"]
        torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(params[num:], twins[num:], rtol=1e-5, atol=1e-6)


def test_a_state_of_torch_loads_in_place() -> None:
    params = make_params(SHAPES)
    source = torch.optim.Muon(params, lr=0.1)
    take_steps(1, source)
    twins = copies_of(params)
    target = Muon(twins, lr=0.3)
    load_in_place(source, target)
    assert target.param_groups[0]["lr"] == 0.1
    for param, twin in zip(params, twins, strict=True):
        buffers = source.state[param], target.state[twin]
        assert torch.equal(*(state["momentum_buffer"] for state in buffers))
