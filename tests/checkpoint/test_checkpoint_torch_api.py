"""torch's own state-dict functions and plain torch.distributed.checkpoint on sharded models."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from checkpoint_helpers import (
    Setup,
    addresses,
    contents,
    digests,
    make,
    save_on_ranks,
    train_plainly,
)
from ranks import RankPool, on_ranks

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


def small(shard: Callable[..., Any], seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5) * (seed + 1)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what people give to torch.distributed.checkpoint."""
    state = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": state}


# On four ranks some have no row of a parameter, and others behind them do.
@pytest.mark.parametrize("ranks", ["ranks2", "ranks4"])
@on_ranks()
def test_checkpoints_of_fsdp2_are_loaded_and_ours_by_it(tmp_path: Path) -> None:
    """Theirs into ours, and back, by torch's own functions; and files of ours by its reader."""
    kinds: dict[str, Callable[..., Any]] = {
        "theirs": torch_fsdp.fully_shard,
        "ours": graphfsdp.fully_shard,
    }
    for saving, loading in (("theirs", "ours"), ("ours", "theirs"), ("ours", "ours")):
        model, optimizer = small(kinds[saving], 0)
        folder = tmp_path / f"{saving} {loading}"
        dcp_save(states_of(model, optimizer), checkpoint_id=folder)
        expected = contents(model, optimizer)
        other, its_optimizer = small(kinds[loading], 1)
        state = states_of(other, its_optimizer)
        dcp_load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, its_optimizer, state["optimizer"])
        assert differing(other, its_optimizer, expected) == []
    model, optimizer = small(kinds["ours"], 2)
    folder = graphfsdp.save(tmp_path / "saved", model, optimizer)
    reader = HuggingFaceStorageReader(str(folder))
    other, its_optimizer = small(kinds["theirs"], 3)
    state = states_of(other, its_optimizer)
    del state["optimizer"]["param_groups"]
    dcp_load(state, storage_reader=reader)
    assert differing(other, its_optimizer, contents(model, optimizer)) == []
    part, _ = small(kinds["ours"], 4)
    larger = nn.Sequential(*part.children(), nn.Linear(3, 3))
    saved = reader.read_metadata().state_dict_metadata
    here = {f"model.{name}": tensor for name, tensor in get_model_state_dict(larger).items()}
    dcp_load({name: here[name] for name in here.keys() & saved.keys()}, storage_reader=reader)
    weights = {name: contents(model, optimizer)[name] for name, _ in model.named_parameters()}
    assert differing(part, its_optimizer, weights) == []


OPTIONS = ("full_state_dict", "cpu_offload", "broadcast_from_rank0", "ignore_frozen_params")


def all_options() -> list[StateDictOptions]:
    """Every combination that torch itself can load again."""
    found = []
    for chosen in itertools.product((False, True), repeat=len(OPTIONS)):
        flags: dict[str, Any] = dict(zip(OPTIONS, chosen, strict=True))
        options = StateDictOptions(**flags)
        options.strict = not options.ignore_frozen_params  # a frozen one would be missing
        if options.full_state_dict or not options.broadcast_from_rank0:
            found.append(options)
    return found


def everywhere(state: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Give a full state that only rank 0 has to all ranks, unless torch does that."""
    if not options.full_state_dict or not options.cpu_offload or options.broadcast_from_rank0:
        return state
    box = [state]
    dist.broadcast_object_list(box, 0)
    return box[0]


def check_options() -> None:
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    states = contents(model, optimizer)
    # With both flags torch loses the names of the parameters, on its own sharded models, too.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for options in (*all_options(), flat):
        lenient = replace(options, strict=False)  # one parameter has never been stepped
        weights = everywhere(get_model_state_dict(model, options=options), options)
        moments = everywhere(get_optimizer_state_dict(model, optimizer, options=lenient), options)
        other, its_optimizer = new()
        before = addresses(other, its_optimizer)
        expected = dict(states)
        if options.ignore_frozen_params:
            expected["frozen"] = contents(other, its_optimizer)["frozen"]
            assert not torch.equal(expected["frozen"], states["frozen"])
        set_model_state_dict(other, dict(weights), options=options)
        set_optimizer_state_dict(other, its_optimizer, moments, options=lenient)
        assert differing(other, its_optimizer, expected) == [], asdict(options)
        assert addresses(other, its_optimizer) == before, asdict(options)


def check_clones() -> None:
    """What was cloned has our rows, whatever torch says of its placement."""
    lenient = StateDictOptions(strict=False)
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    moments = get_optimizer_state_dict(model, optimizer, options=lenient)
    other, its_optimizer = new()
    other.load_state_dict({n: value.detach().clone() for n, value in model.state_dict().items()})
    set_optimizer_state_dict(other, its_optimizer, moments, options=lenient)
    assert differing(other, its_optimizer, contents(model, optimizer)) == []
    other, its_optimizer = new()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other.load_state_dict(whole)  # plain and whole, on every rank
    set_optimizer_state_dict(other, its_optimizer, moments, options=lenient)
    assert differing(other, its_optimizer, contents(model, optimizer)) == []


def test_torch_puts_weights_together_without_the_model(tmp_path: Path, ranks2: RankPool) -> None:
    expected = ranks2.run(save_on_ranks, tmp_path, SHARDED)[0]
    reader = HuggingFaceStorageReader(str(tmp_path / "step-00000003"))
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp_load(weights, storage_reader=reader)
    found = digests({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("check", [check_options, check_clones])
@on_ranks("ranks2")
def test_whatever_torch_gives_is_loaded(check: Callable[[], None]) -> None:
    check()


@on_ranks("ranks4")
def test_rows_in_another_order_than_the_ranks_are_loaded() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, other = (
        graphfsdp.fully_shard(
            nn.Linear(5, 8),
            mesh,
            shard_axis="inner",
            replicate_axis="outer",
            outer_strategy="optim",
        )
        for _ in range(2)
    )
    weight: Any = other.weight
    assert any(getattr(place, "order", None) is not None for place in weight.placements)
    cut_by_torch = StateDictOptions(full_state_dict=True)
    from_one = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=cut_by_torch)
    clones = {name: param.detach().clone() for name, param in model.named_parameters()}
    for state, options in ((whole, cut_by_torch), (whole, from_one), (clones, None)):
        with torch.no_grad():
            for param in other.parameters():
                param.zero_()
        set_model_state_dict(other, dict(state), options=options)
        for name, param in other.named_parameters():
            now: Any = param
            assert torch.equal(now.full_tensor(), whole[name])
