"""Checkpoints of version 0.1 load for one more release; ``version_1`` was saved by its writer.

Two ranks with ZeRO-3, bf16 and float32 main weights have saved it, after three steps.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import Setup, contents, digests, load_on_ranks, make
from graphfsdp.optim import FusedAdam
from ranks import RankPool

SAVED = Path(__file__).parent / "version_1"
EXPECTED = json.loads((SAVED / "expected.json").read_text())


class Tokens:
    """An object with a tensor that is too large for the file of objects."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def load_all(setup: Setup) -> tuple[dict[str, str], list[float]]:
    model, optimizer = make(setup, seed=1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    tokens = Tokens()
    objects: dict[str, Any] = {"lr": scheduler, "tokens": tokens}
    loaded = graphfsdp.load(SAVED, model, optimizer, objects=objects)
    assert loaded.step == 3
    assert torch.equal(tokens.state["tokens"], torch.arange(3000))
    assert tokens.state["inf"] == float("inf")
    assert tokens.state["pair"] == (1, "two")
    assert scheduler.last_epoch == 1
    return digests(contents(model, optimizer)), torch.rand(2).tolist()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_it_loads_on_as_many_ranks_with_objects_and_generators(
    strategy: str, ranks2: RankPool
) -> None:
    for rank, (found, drawn) in enumerate(ranks2.run(load_all, Setup(strategy, "bf16"))):
        assert found == EXPECTED["digests"]
        assert drawn == EXPECTED["drawn"][rank]


def test_it_loads_into_one_process_that_trains(ranks1: RankPool) -> None:
    assert ranks1.run(load_on_ranks, [SAVED], Setup(None))[0] == [EXPECTED["digests"]]


@pytest.mark.parametrize("name", ["data-00001.safetensors", "objects-00000.json", "manifest.json"])
@pytest.mark.parametrize("place", [20, -3])
def test_damage_in_it_is_named(name: str, place: int, tmp_path: Path) -> None:
    shutil.copytree(SAVED, tmp_path / "copy")
    path = tmp_path / "copy" / "step-00000003" / name
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    model, optimizer = make(Setup(None))
    before = digests(contents(model, optimizer))
    with pytest.raises(graphfsdp.CheckpointError, match=name):
        graphfsdp.load(tmp_path / "copy", model, optimizer)
    assert digests(contents(model, optimizer)) == before
    assert not dist.is_initialized()


def with_remainders(path: Path) -> tuple[Tensor, Tensor]:
    """Save float32 weights as bfloat16 ones and the 16 bits that these lack; return both wholes."""
    main, moment = torch.randn(5, 4), torch.rand(5, 4)
    bits = main.view(torch.int32)
    rounded = (bits + 32768) >> 16  # so that the rest is in [-32768, 32767]
    model = nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
    optimizer = FusedAdam(model.parameters(), master_weights=True)
    optimizer.create_missing([model.weight])
    with torch.no_grad():
        model.weight.copy_(rounded.to(torch.int16).view(torch.bfloat16))
    optimizer.state[model.weight] |= {
        "exp_avg": moment,
        "exp_avg_sq": moment,
        "master_param": (bits - (rounded << 16)).to(torch.int16),
    }
    graphfsdp.save(path, model, optimizer)
    return main, moment


def load_remainders(path: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    model = nn.Linear(4, 5, bias=False, dtype=dtype)
    if dist.is_initialized():
        graphfsdp.fully_shard(model)
    optimizer = FusedAdam(model.parameters(), master_weights=dtype == torch.bfloat16)
    graphfsdp.load(path, model, optimizer)
    state = optimizer.state[model.weight]
    found: list[Any] = [state.get("master_param", model.weight.detach()), state["exp_avg"]]
    main, moment = (getattr(value, "full_tensor", value.clone)().cpu() for value in found)
    return main, moment


def test_main_weights_that_were_saved_as_16_bits_are_whole_again(
    tmp_path: Path, ranks2: RankPool
) -> None:
    """As version 0.1 could, and Transformer Engine can."""
    main, moment = with_remainders(tmp_path)
    found = [load_remainders(tmp_path, dtype) for dtype in (torch.bfloat16, torch.float32)]
    for got in (*found, *ranks2.run(load_remainders, tmp_path, torch.float32)):
        assert torch.equal(got[0], main)
        assert torch.equal(got[1], moment)
