"""torch's own state-dict functions and plain torch.distributed.checkpoint on sharded models."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from checkpoint_helpers import Setup, addresses, contents, make, train_plainly
from ranks import RankPool

SHARDED = Setup("optim_grads_params")


def differing(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Tensor]
) -> list[str]:
    found = contents(model, optimizer)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make(SHARDED, seed=1)
    train_plainly(model, optimizer, 1)
    return model, optimizer


def check_torch_functions(path: Path) -> None:
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    everything = contents(model, optimizer)
    weights = {name: everything[name] for name, _ in model.named_parameters()}
    options = StateDictOptions(full_state_dict=True)
    everywhere: dict[str, Any] = get_model_state_dict(model, options=options)
    assert all(torch.equal(everywhere[name], value) for name, value in weights.items())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_rank_0 = get_model_state_dict(model, options=options)
    assert (len(on_rank_0) > 0) == (dist.get_rank() == 0)

    for state, options in (
        (on_rank_0, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        (get_model_state_dict(model), StateDictOptions()),
    ):
        other, its_optimizer = new()
        before = addresses(other, its_optimizer)
        set_model_state_dict(other, state, options=options)
        assert differing(other, its_optimizer, weights) == [], options
        assert addresses(other, its_optimizer) == before

    # With torch's own planner and files: the rows of every rank go where they belong.
    dcp_save(get_model_state_dict(model), checkpoint_id=path / "plain")
    other, its_optimizer = new()
    state = get_model_state_dict(other)
    dcp_load(state, checkpoint_id=path / "plain")
    set_model_state_dict(other, state)
    assert differing(other, its_optimizer, weights) == []

    # The optimizer, sharded; torch knows no parameter that has not been stepped yet.
    lenient = StateDictOptions(strict=False)
    states = get_optimizer_state_dict(model, optimizer, options=lenient)
    set_optimizer_state_dict(other, its_optimizer, states, options=lenient)
    assert differing(other, its_optimizer, everything) == []


def test_torch_functions_find_the_right_rows(tmp_path: Path, ranks2: RankPool) -> None:
    ranks2.run(check_torch_functions, tmp_path)
