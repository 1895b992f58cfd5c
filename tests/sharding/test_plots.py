"""Pictures of the flat layout."""

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from graphfsdp.errors import ConfigError
from graphfsdp.planning.model_plan import plan_model
from graphfsdp.plots import draw_layout
from ranks import on_ranks
from sharding_helpers import make_net

PNG = b"\x89PNG"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 1))


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


def test_without_matplotlib_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install graphfsdp\[plot\]"):
        draw_layout(small(), tmp_path / "picture.png")
