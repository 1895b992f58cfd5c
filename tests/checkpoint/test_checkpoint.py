"""`graphfsdp.save` and `graphfsdp.load` in one process: bits, addresses, live graphs, reports."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import (
    Setup,
    addresses,
    contents,
    digests,
    load_on_ranks,
    save_on_ranks,
)
from graphfsdp.optim import FusedAdam
from ranks import RankPool

Step = graphfsdp.CapturedStep


class Small(nn.Module):
    """Dropout, a buffer that changes, tied weights and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        self.tied = nn.Linear(4, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        loss: Tensor = self.tied(self.last(hidden)).square().mean() + self.frozen.sum() * 0
        return loss


def small(
    device: torch.device, seed: int, **options: Any
) -> tuple[Small, FusedAdam, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(seed)
    model = Small().to(device)
    optimizer = FusedAdam(model.parameters(), lr=0.05, weight_decay=0.1, **options)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


def run(step: Step, scheduler: Any, device: torch.device, first: int, last: int) -> list[Tensor]:
    """Train on batches that depend on the iteration's number alone."""
    losses = []
    for index in range(first, last):
        generator = torch.Generator().manual_seed(index)
        losses.append(step(torch.randn(8, 4, generator=generator).to(device)))
        scheduler.step()
    return losses


def assert_equal_states(left: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    assert digests(contents(*left)) == digests(contents(*right))
    for name, buffer in left[0].named_buffers():
        assert torch.equal(buffer, right[0].get_buffer(name)), name


@pytest.mark.parametrize("scope", ["none", "full_iteration"])
@pytest.mark.parametrize("saved_scope", ["none", "full_iteration"])
def test_a_run_that_loads_midway_goes_on_like_the_one_that_saved(
    saved_scope: str, scope: str, device: torch.device, tmp_path: Path
) -> None:
    """The loading one is in the middle of its replays, and is not captured again."""
    model, optimizer, scheduler = small(device, 0)
    with graphfsdp.capture(model, optimizer, scope=saved_scope, max_grad_norm=1.0) as step:
        run(step, scheduler, device, 0, 7)
        graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler}, step=7)
        expected = run(step, scheduler, device, 7, 19)
    other, its_optimizer, its_scheduler = small(device, 1)
    with graphfsdp.capture(other, its_optimizer, scope=scope, max_grad_norm=1.0) as step:
        run(step, its_scheduler, device, 100, 109)
        before = addresses(other, its_optimizer)
        loaded = graphfsdp.load(tmp_path, other, its_optimizer, objects={"lr": its_scheduler})
        assert (loaded.step, loaded.skipped) == (7, ())
        assert addresses(other, its_optimizer) == before
        got = run(step, its_scheduler, device, 7, 19)
        assert step.report().num_captures == (scope == "full_iteration")
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert_equal_states((model, optimizer), (other, its_optimizer))
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()


def test_generators_are_saved_and_set(device: torch.device, tmp_path: Path) -> None:
    import random

    import numpy

    def draw() -> list[Any]:
        return [
            torch.rand(3).tolist(),
            torch.rand(3, device=device).tolist(),
            random.random(),
            numpy.random.rand(),
            numpy.random.randn(),
        ]

    model = nn.Linear(2, 2)
    draw()
    graphfsdp.save(tmp_path, model)
    expected = draw()
    graphfsdp.load(tmp_path, model, rng=False)
    assert draw() != expected
    graphfsdp.load(tmp_path, model)
    assert draw() == expected


WAYS = (Setup(None, "fp32"), Setup(None, "bf16"))


@pytest.mark.parametrize("setup", WAYS, ids=lambda way: way.precision)
def test_main_weights_in_the_optimizer_and_in_the_model_are_the_same_bits(
    setup: Setup, tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    """float32 in the model, or beside a bf16 one: each loads into each."""
    expected = ranks1.run(save_on_ranks, tmp_path / "one", setup)[0]
    sharded = Setup("optim_grads_params", "bf16")
    assert ranks2.run(load_on_ranks, [tmp_path / "one"], sharded)[0] == [expected]
    back = ranks2.run(save_on_ranks, tmp_path / "two", sharded)[0]
    paths = [tmp_path / "two", tmp_path / "one"]
    for way in WAYS:
        results = ranks1.run(load_on_ranks, paths, way)[0]
        for saved, got in zip((back, expected), results, strict=True):
            if way.precision != "fp32":
                saved.pop("frozen", None)  # nobody has a main weight of it
            differing = [name for name, bits in saved.items() if got[name] != bits]
            assert not differing, (way, differing)
            extra = {"unused step", "unused exp_avg", "unused exp_avg_sq", "frozen"}
            assert got.keys() - saved.keys() <= extra


@pytest.mark.parametrize("sharded", [Setup("optim_grads_params"), Setup("optim")])
def test_adamw_on_one_device_and_a_sharded_fused_adam_take_over_from_each_other(
    sharded: Setup, tmp_path: Path, ranks1: RankPool, ranks2: RankPool
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    expected = ranks1.run(save_on_ranks, one, Setup(None), "adamw")[0]
    assert ranks2.run(load_on_ranks, [one], sharded)[0] == [expected]
    back = ranks2.run(save_on_ranks, two, sharded)[0]
    assert ranks1.run(load_on_ranks, [two], Setup(None), "adamw")[0] == [back]


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    """Everything is JSON or raw bytes behind JSON: reading it cannot run code."""
    model, optimizer, scheduler = small(torch.device("cpu"), 0)
    folder = graphfsdp.save(tmp_path, model, optimizer, objects={"lr": scheduler})
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["data-00000-0.safetensors", "manifest.json", "objects-00000.json"]
    for name in names[1:]:
        json.loads((folder / name).read_text())
    read = load_file(folder / names[0])
    assert torch.equal(read["model.first.weight"], model.first.weight)


class Opaque:
    """An object whose state only a pickle could hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": [1, {"what": object()}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_what_only_a_pickle_could_hold_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(graphfsdp.CheckpointError, match=r"objects/it\.inner\[1\]\.what is a obj"):
        graphfsdp.save(tmp_path, nn.Linear(1, 1), objects={"it": Opaque()})
    assert not list(tmp_path.iterdir())


def test_a_dtype_that_no_file_holds_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    said = r"'model\.phases'\] have the dtype torch\.complex128, .* cannot hold"
    with pytest.raises(graphfsdp.CheckpointError, match=said):
        graphfsdp.save(tmp_path, model)
    assert not list(tmp_path.iterdir())


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(graphfsdp.ConfigError, match="objects\\['it'\\] is a int"):
        graphfsdp.save(tmp_path, model, objects={"it": 3})  # type: ignore[dict-item]
    for step in ("3", 2.0, True, -1):
        with pytest.raises(graphfsdp.ConfigError, match="step must be an integer of at least 0"):
            graphfsdp.save(tmp_path, model, step=step)  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["endless"] = endless
    thing = types.SimpleNamespace(state_dict=lambda: endless, load_state_dict=print)
    with pytest.raises(graphfsdp.CheckpointError, match=r"'thing'. holds itself"):
        graphfsdp.save(tmp_path, model, objects={"thing": thing})
    with pytest.raises(graphfsdp.ConfigError, match="keep_last must be an integer of at least 1"):
        graphfsdp.save(tmp_path, model, keep_last=0)
    with pytest.raises(graphfsdp.CheckpointError, match="nothing has been saved there"):
        graphfsdp.load(tmp_path, model)


def test_old_checkpoints_go_and_a_step_can_be_chosen(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    for step in (5, 10, 15, 15):
        with torch.no_grad():
            model.weight.fill_(step + len(list(tmp_path.iterdir())) / 100)
        last = model.weight.item()
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "step-00000010", "step-00000015.1"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert model.weight.item() == last
    assert graphfsdp.load(tmp_path, model, step=10).step == 10
    assert int(model.weight) == 10
    with pytest.raises(graphfsdp.CheckpointError, match=r"no checkpoint of step 5.*step=10, 15"):
        graphfsdp.load(tmp_path, model, step=5)
    assert graphfsdp.save(tmp_path, model).name == "step-00000016"


def test_who_goes_back_keeps_what_the_run_goes_on_from(tmp_path: Path) -> None:
    """And not the later ones in its place, which may be damaged."""
    model = nn.Linear(1, 1, bias=False)

    def save(step: int) -> list[str]:
        graphfsdp.save(tmp_path, model, step=step, keep_last=2)
        return sorted(path.name for path in tmp_path.iterdir())

    for step in (10, 20):
        save(step)
    graphfsdp.load(tmp_path, model, step=10)
    assert save(15) == ["latest", "step-00000010", "step-00000015", "step-00000020"]
    assert graphfsdp.load(tmp_path, model).step == 15
    assert save(20) == ["latest", "step-00000015", "step-00000020.1"]
