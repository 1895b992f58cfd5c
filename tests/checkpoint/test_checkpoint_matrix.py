"""Saved by any ranks, strategy, precision, mesh, or by torch, loaded by others: the same bits."""

import itertools
from collections.abc import Callable, Iterable, Mapping
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
    SETUPS,
    Setup,
    addresses,
    contents,
    load_on_ranks,
    make,
    save_on_ranks,
    train_plainly,
)
from ranks import RankPool, on_ranks

Way = tuple[int, Setup]  # number of ranks, and how the model is cut

SAVED = tuple(zip((1, 2, 4, 1, 1, 2, 2, 1), SETUPS, strict=True))
LOADED = tuple(zip((1, 1, 1, 1, 2, 1, 1, 4), SETUPS, strict=True))
# Each way of loading with those of saving that it meets.
PAIRS = {LOADED[n]: [SAVED[(n + k) % 8] for k in (6, 1, 3)] for n in range(8)}

ONE_DEVICE = (1, Setup(None))
ONE_AXIS = (2, Setup("optim_grads_params"))
REPEATED = (4, Setup("optim_grads_params", "bf16", "no_shard"))
CUT_TWICE = (4, Setup("optim_grads_params", "fp32", "optim"))
ZERO_ONE = (4, Setup("optim", "bf16", "optim"))
AXES = {
    ONE_DEVICE: [REPEATED, CUT_TWICE],
    ONE_AXIS: [CUT_TWICE, ZERO_ONE],
    REPEATED: [CUT_TWICE, ONE_AXIS],
    CUT_TWICE: [ONE_DEVICE, REPEATED],
}


# Main weights beside bf16 ones in the optimizer, or in the model.
NARROW = (1, Setup(None, "bf16"))
SHARDED_NARROW = (2, Setup("optim_grads_params", "bf16"))
MAIN_WEIGHTS = {
    SHARDED_NARROW: [ONE_DEVICE, NARROW],
    ONE_DEVICE: [SHARDED_NARROW, NARROW],
    NARROW: [SHARDED_NARROW, ONE_DEVICE],
}

# What ranks share out by tensors or by experts are whole parameters there.
TENSORS, EXPERTS = (4, Setup(None, model="tensor")), (4, Setup(None, model="expert"))
FEED, MIXTURE = (1, Setup(None, model="feed")), (1, Setup(None, model="mixture"))
PARALLEL = {
    FEED: [TENSORS],
    (2, Setup("optim_grads_params", model="feed")): [TENSORS],
    TENSORS: [FEED],
    MIXTURE: [EXPERTS],
    (2, Setup("optim_grads_params", model="mixture")): [EXPERTS],
    EXPERTS: [MIXTURE],
}


@pytest.fixture(scope="module")
def pools(ranks1: RankPool, ranks2: RankPool, ranks4: RankPool) -> dict[int, RankPool]:
    return {1: ranks1, 2: ranks2, 4: ranks4}


@pytest.mark.parametrize(
    "pairs",
    [PAIRS, AXES, MAIN_WEIGHTS, PARALLEL],
    ids=["every two", "axes", "main weights", "model-parallel"],
)
def test_a_checkpoint_loads_elsewhere_with_the_same_bits(
    pairs: Mapping[Way, Iterable[Way]], tmp_path: Path, pools: dict[int, RankPool]
) -> None:
    saved: dict[Way, tuple[Path, dict[str, str]]] = {}
    for source in dict.fromkeys(way for sources in pairs.values() for way in sources):
        path = tmp_path / str(len(saved))
        saved[source] = path, pools[source[0]].run(save_on_ranks, path, source[1], limit_s=90)[0]
    for way, sources in pairs.items():
        paths = [saved[source][0] for source in sources]
        found = pools[way[0]].run(load_on_ranks, paths, way[1], limit_s=110)
        for rank, results in enumerate(found):
            for source, got in zip(sources, results, strict=True):
                expected = dict(saved[source][1])
                if way == NARROW:  # no main weight of what is frozen, one of what never stepped
                    del expected["frozen"]
                    never = {"frozen", "unused step", "unused exp_avg", "unused exp_avg_sq"}
                    got = {name: bits for name, bits in got.items() if name not in never}
                wrong = [name for name, bits in expected.items() if got[name] != bits]
                assert not wrong, f"rank {rank} of {way}, saved by {source}: {wrong}"
                assert got.keys() == expected.keys()


SHARDED = Setup("optim_grads_params")


def differing(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: dict[str, Tensor]
) -> list[str]:
    found = contents(model, optimizer)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


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


@on_ranks("ranks2")
def test_whatever_torch_gives_is_loaded() -> None:
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    states = contents(model, optimizer)
    # With both flags torch loses the names of the parameters, on its own sharded models, too.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for options in (*all_options(), flat):
        lenient = replace(options, strict=False)  # one parameter has never been stepped
        weights = everywhere(get_model_state_dict(model, options=options), options)
        moments = everywhere(get_optimizer_state_dict(model, optimizer, options=lenient), options)
        other, its_optimizer = make(SHARDED, seed=1)
        train_plainly(other, its_optimizer, 1)
        before = addresses(other, its_optimizer)
        expected = dict(states)
        if options.ignore_frozen_params:
            expected["frozen"] = contents(other, its_optimizer)["frozen"]
            assert not torch.equal(expected["frozen"], states["frozen"])
        set_model_state_dict(other, dict(weights), options=options)
        set_optimizer_state_dict(other, its_optimizer, moments, options=lenient)
        assert differing(other, its_optimizer, expected) == [], asdict(options)
        assert addresses(other, its_optimizer) == before, asdict(options)


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
