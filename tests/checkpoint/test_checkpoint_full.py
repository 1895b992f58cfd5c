"""Whole state dicts, safetensors, and the commands that show and convert."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphfsdp
from checkpoint_helpers import (
    Setup,
    addresses,
    contents,
    digests,
    load_on_ranks,
    make,
    save_on_ranks,
    train_plainly,
)
from graphfsdp.checkpoint import full_state_dict, load_full_state_dict
from graphfsdp.cli import main
from graphfsdp.optim import FusedAdam
from ranks import RankPool

SHARDED = Setup("optim_grads_params", "bf16")
ALONE = Setup(None)
Command = Callable[..., str]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``graphfsdp checkpoint``: asks for an exit code, returns what was printed."""

    def call(*words: object, code: int = 0) -> str:
        assert main(["checkpoint", *map(str, words)]) == code
        said = capsys.readouterr()
        return said.err if code and said.err else said.out

    return call


def full_out_and_in(folder: Path) -> list[dict[str, str]]:
    """Gather, write with torch.save, and load what came from one device."""
    model, optimizer = make(SHARDED)
    train_plainly(model, optimizer, 2)
    state = full_state_dict(model, optimizer)
    assert (state == {}) == (dist.get_rank() > 0)
    if state:
        assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
        torch.save(state, folder / "sharded.pt")
    expected = digests(contents(model, optimizer))
    other, its_optimizer = make(SHARDED, seed=1)
    train_plainly(other, its_optimizer, 1)
    before = addresses(other, its_optimizer)
    load_full_state_dict(other, state or None, its_optimizer)
    assert digests(contents(other, its_optimizer)) == expected
    assert addresses(other, its_optimizer) == before
    dist.barrier()
    return [expected]


def full_alone(folder: Path) -> dict[str, str]:
    """Load a file that sharded ranks have written; write one for them."""
    model, optimizer = make(ALONE, seed=1)
    graphfsdp.load(folder / "sharded.pt", model, optimizer)
    state = full_state_dict(model, optimizer)
    torch.save(state, folder / "alone.pt")
    return digests(contents(model, optimizer))


def test_full_state_dicts_go_out_of_and_into_sharded_models(
    tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    expected = ranks2.run(full_out_and_in, tmp_path)[0][0]
    assert ranks1.run(full_alone, tmp_path)[0] == expected
    assert ranks2.run(load_on_ranks, [tmp_path / "alone.pt"], SHARDED) == [[expected]] * 2
    state = torch.load(tmp_path / "sharded.pt", weights_only=True)
    plain, _ = make(ALONE, seed=3)
    plain.load_state_dict(state["model"])  # torch's own way in


def load_weights(path: Path) -> dict[str, str]:
    model, optimizer = make(SHARDED, seed=2)
    graphfsdp.load(path, model)
    return digests(contents(model, optimizer))


def test_conversions_keep_every_bit(tmp_path: Path, ranks2: RankPool, command: Command) -> None:
    """Sharded to full and to safetensors, and back onto ranks."""
    source = tmp_path / "sharded"
    expected = ranks2.run(save_on_ranks, source, SHARDED)[0]
    for target in ("full.pt", "model.safetensors"):
        command("convert", source, tmp_path / target)
    assert ranks2.run(load_on_ranks, [tmp_path / "full.pt"], SHARDED)[0] == [expected]
    weights = ranks2.run(load_weights, tmp_path / "model.safetensors")[0]
    assert {name: expected[name] for name in weights if " " not in name} == {
        name: bits for name, bits in weights.items() if " " not in name
    }
    safetensors = pytest.importorskip("safetensors.torch")
    plain, _ = make(ALONE, seed=3)
    safetensors.load_model(plain, tmp_path / "model.safetensors")
    bits = digests({name: param.detach() for name, param in plain.named_parameters()})
    assert bits == {name: expected[name] for name in bits}
    safetensors.save_model(plain, str(tmp_path / "theirs.safetensors"))
    assert ranks2.run(load_weights, tmp_path / "theirs.safetensors")[0] == weights
    command("convert", source, tmp_path / "narrow.pt", "--dtype", "bfloat16")
    narrow = torch.load(tmp_path / "narrow.pt", weights_only=True)
    whole = torch.load(tmp_path / "full.pt", weights_only=True)
    for name, tensor in whole["model"].items():
        kept = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(narrow["model"][name], kept)
    again = command("convert", source, tmp_path / "full.pt", code=1)
    assert "exists; nothing is overwritten" in again


def saved(folder: Path, value: float = 1.0, step: int = 3) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = FusedAdam(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight[1, 2] = value
    return graphfsdp.save(folder, model, optimizer, step=step, rng=False)


def test_show_says_what_is_inside(tmp_path: Path, command: Command) -> None:
    saved(tmp_path)
    folder = saved(tmp_path, step=7)
    shown = command("show", tmp_path, "--tensors", "--verify")
    for expected in (
        "step:      7 (in this folder: 3, 7)",
        "saved by:  1 rank(s), ",
        f"torch {torch.__version__}",
        "model:     2 tensors, 15 elements, 60 bytes",
        "optimizer: 4 tensors, 30 elements, 120 bytes",
        "FusedAdam, 2 parameters with a state",
        "group 0: 2 parameters, ",
        "lr=0.5",
        "model/weight  float32 [3, 4] in 1 piece(s)",
        "every checksum is right",
    ):
        assert expected in shown, expected
    data = folder / "data-00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    command("show", tmp_path)
    command("show", tmp_path, "--step", 3, "--verify")
    said = command("show", tmp_path, "--verify", code=1)
    assert "optimizer/weight/exp_avg_sq is damaged" in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show"], 2, "the following arguments are required: path"),
        ([], 2, "the following arguments are required: command"),
        (["show", "nothing"], 1, "is no folder of checkpoints"),
        (["convert", "a", "b.safetensors", "--dtype", "int8"], 1, "no floating-point dtype"),
        (["convert", "a", "b"], 1, "b is no name of a file that ends in .safetensors, .pt"),
    ],
)
def test_bad_words_are_answered_in_one_line(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "a")
    errors = command(*words, code=code)
    assert said in errors
    assert errors.count("\n") == 1


class Bomb:
    """What a pickle can do to those who load it."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("bang",))


def test_a_file_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": torch.ones(1), "extra": Bomb()}, "evil.pt")
    with pytest.raises(graphfsdp.CheckpointError, match="cannot be read as a state dict"):
        graphfsdp.load("evil.pt", nn.Linear(1, 1))
    assert not Path("bang").exists()


def test_a_safetensors_file_needs_the_package_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    pytest.importorskip("safetensors")
    saved(tmp_path / "a")
    path = tmp_path / "model.safetensors"
    command("convert", tmp_path / "a", path)
    content = path.read_bytes()
    for damaged in (content[:-1], b"\xff" * 8 + content[8:], content[:9] + b"x" + content[10:]):
        path.write_bytes(damaged)
        with pytest.raises(graphfsdp.CheckpointDamagedError, match="cut off or damaged"):
            graphfsdp.load(path, nn.Linear(4, 3))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(graphfsdp.CheckpointError, match=r'pip install "graphfsdp\[safetensors\]"'):
        graphfsdp.load(path, nn.Linear(4, 3))
