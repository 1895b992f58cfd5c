"""Copies and pickles of what is being trained: each works alone, or is refused with its remedy."""

import copy
import io
import pathlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from counting_net import mean_square
from graphfsdp import NotCopyableError
from graphfsdp.optim import FusedAdam, Muon
from helpers import assert_same_state, snapshot
from ranks import on_ranks

Pair = tuple[nn.Module, torch.optim.Optimizer]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved,
}


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> graphfsdp.CapturedStep:
    options: dict[str, Any] = {"loss_fn": mean_square, "warmup_steps": 1, "max_grad_norm": 0.5}
    return graphfsdp.capture(model, optimizer, **options)


def muon_of(params: Any, lr: float) -> Muon:
    params = list(params)
    matrices, others = ([p for p in params if (p.dim() == 2) is wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "use_muon": False}]
    return Muon(groups, lr=lr)


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_that_is_being_replayed_is_copied_and_both_train_alike(way: str) -> None:
    """The graph stays with the original; nothing is shared."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    step = capture(model, optim)
    batches = [torch.randn(5, 4) for _ in range(9)]
    for batch in batches[:4]:
        step(batch)
    before = snapshot(model, optim)
    pair: Pair = WAYS[way]((model, optim))
    assert pair[1].param_groups[0]["params"][0] is next(pair[0].parameters())
    other = capture(*pair)
    losses = [other(batch) for batch in batches[4:]]
    assert_same_state(before, snapshot(model, optim), "the original")
    for batch, loss in zip(batches[4:], losses, strict=True):
        assert torch.equal(step(batch), loss)
    assert step.report().num_captures == other.report().num_captures == 1
    after = snapshot(model, optim)
    step.close()
    assert torch.isfinite(other(batches[0]))  # it lives without the original
    assert_same_state(after, snapshot(model, optim), "the original")


@pytest.mark.parametrize("way", WAYS)
def test_our_optimizers_are_not_copied(way: str) -> None:
    params = [nn.Parameter(torch.ones(2, 3))]
    for optim in (FusedAdam(params), Muon(params)):
        with pytest.raises(NotCopyableError, match=r"cannot be pickled .*load_state_dict"):
            WAYS[way](optim)


def captured_on_ranks(make_optim: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return a sharded model and its optimizer that have been replayed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    graphfsdp.fully_shard(model[0])
    graphfsdp.fully_shard(model)
    optim = make_optim(model.parameters(), lr=0.01)
    step = capture(model, optim)
    for _ in range(5):
        step(torch.ones(5, 4))
    return model, optim, step


@on_ranks("ranks2")
def test_the_state_of_a_sharded_run_is_saved_and_copied_by_torch(tmp_path: pathlib.Path) -> None:
    """torch.save on each rank, as people do who keep the world's size."""
    for make_optim in (FusedAdam, muon_of, partial(torch.optim.AdamW, fused=True)):
        model, optim, step = captured_on_ranks(make_optim)
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
        assert_shares_memory(state["model"], model)
        copied = copy.deepcopy(state)
        path = tmp_path / f"{type(optim).__name__}{torch.distributed.get_rank()}.pt"
        torch.save(state, path)
        expected = [step(torch.ones(5, 4)) for _ in range(3)]
        step.close()
        for again in (torch.load(path), copied):  # weights_only, which is torch's default
            model.load_state_dict(again["model"])
            optim.load_state_dict(again["optim"])
            with capture(model, optim) as step:
                for loss in expected:
                    assert torch.equal(step(torch.ones(5, 4)), loss)


def assert_shares_memory(state: dict[str, Any], model: nn.Module) -> None:
    params: dict[str, Any] = dict(model.named_parameters())
    for name, value in state.items():
        assert value.to_local().data_ptr() == params[name].to_local().data_ptr()
        version = params[name]._version
        value.mul_(1.0)
        assert params[name]._version == version + 1, "what was gathered before is old now"
