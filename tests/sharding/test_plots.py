"""Pictures of the flat layout and of the lifetimes of buffers."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import graphfsdp
from graphfsdp._capture.report.tables import BufferUse, Role
from graphfsdp.errors import ConfigError, PhaseError
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.model_plan import plan_model
from graphfsdp.plots import draw_layout, draw_lifetimes, place_buffers
from helpers import quick_garbage_collection
from ranks import on_ranks
from sharding_helpers import make_net

PNG = b"\x89PNG"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))


def report(num_calls: int) -> graphfsdp.CaptureReport:
    quick_garbage_collection()
    model = small()

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(x).square().mean()
        return out

    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        for _ in range(num_calls):
            step(torch.ones(3, 6))
        return step.report()


@needs_matplotlib
def test_layout_of_a_plan_is_drawn_without_ranks(tmp_path: Path) -> None:
    plan = plan_model(small(), ["0"], num_ranks=3)
    draw_layout(plan, tmp_path / "layout.png")
    draw_layout(plan, tmp_path / "layout.svg")
    assert (tmp_path / "layout.png").read_bytes()[:4] == PNG
    text = (tmp_path / "layout.svg").read_text()
    names = ["(root) 0", "0 0", "weight", "2.weight", "bias"]
    assert all(f"<!-- {name} -->" in text for name in names)


@needs_matplotlib
def test_nothing_sharded_is_nothing_to_draw(tmp_path: Path) -> None:
    plan = plan_model(small(), [], num_ranks=3, strategy="no_shard")
    with pytest.raises(ConfigError, match="nothing is sharded"):
        draw_layout(plan, tmp_path / "layout.png")


@needs_matplotlib
@on_ranks("ranks2")
def test_layout_of_a_sharded_model_is_drawn_alike_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / f"{dist.get_rank()}.png"
    draw_layout(make_net("optim"), path)
    dist.barrier()
    first, second = (tmp_path / f"{rank}.png" for rank in range(2))
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(PNG)


@needs_matplotlib
def test_lifetimes_are_drawn(tmp_path: Path) -> None:
    draw_lifetimes(report(4), tmp_path / "lifetimes.png")
    assert (tmp_path / "lifetimes.png").read_bytes()[:4] == PNG
    with pytest.raises(PhaseError, match="no graph to draw in phase"):
        draw_lifetimes(report(1), tmp_path / "none.png")


def use(index: int, num_bytes: int, first: int, last: int, offset: int | None) -> BufferUse:
    return BufferUse(index, Role.INTERMEDIATE, "", num_bytes, first, last, offset)


def test_buffers_without_a_place_are_put_where_none_lives_with_them() -> None:
    planned = use(0, 64, 0, 9, 0)
    first, second, third = use(1, 10, 0, 4, None), use(2, 20, 2, 6, None), use(3, 10, 5, 9, None)
    places = {u.index: place for u, place in place_buffers([planned, first, second, third], 64)}
    assert places == {0: 0, 1: 64, 2: 74, 3: 64}


@pytest.mark.parametrize("draw", [draw_layout, draw_lifetimes])
def test_without_matplotlib_the_remedy_is_named(
    draw: Callable[[object, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install graphfsdp\[plot\]"):
        draw(None, tmp_path / "picture.png")
