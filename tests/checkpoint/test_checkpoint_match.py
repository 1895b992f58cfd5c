"""Checkpoints that do not fit are reported whole; fused weights are saved in their members."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import graphfsdp
from checkpoint_helpers import whole_numbers
from graphfsdp.checkpoint import (
    FusedWeight,
    fused_qkv,
    gated_delta_net,
    gated_delta_net_conv,
    swiglu,
)
from graphfsdp.checkpoint.manifest import read_manifest
from graphfsdp.checkpoint.parts import Part, members_of
from graphfsdp.errors import ConfigError
from graphfsdp.optim import FusedAdam
from ranks import RankPool


def trained(model: nn.Module, **options: Any) -> FusedAdam:
    optimizer = FusedAdam(model.parameters(), **options)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def bits(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    return [*(p.detach().clone() for p in model.parameters()), *states]


def test_everything_that_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "old": nn.Linear(1, 1)})
    graphfsdp.save(tmp_path, model, trained(model, amsgrad=True), rng=False)
    other = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Linear(5, 2), "new": nn.Linear(1, 1)})
    optimizer = trained(other, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError) as caught:
        graphfsdp.load(tmp_path, other, optimizer, objects={"lr": scheduler})
    text = str(caught.value)
    for expected in (
        "model: 'b.weight': saved [2, 4], here [2, 5]",
        "model: 'new.weight' is missing in the checkpoint",
        "model: 'new.bias' is missing in the checkpoint",
        "model: 'old.weight' is in the checkpoint, but not in the model",
        "optimizer: exp_avg of 'b.weight': saved [2, 4], here [2, 5]",
        "optimizer: 'new.bias' is in no parameter group of the saved optimizer",
        "optimizer: the checkpoint has a state of 'old.bias', which this one does not train",
        "objects: 'lr' is missing in the checkpoint",
        "nothing was loaded",
        "strict=False",
    ):
        assert expected in text, expected
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))
    loaded = graphfsdp.load(tmp_path, other, strict=False)
    assert "model: 'b.weight': saved [2, 4], here [2, 5]" in loaded.skipped
    assert torch.equal(other.get_parameter("a.weight"), model.get_parameter("a.weight"))
    assert torch.equal(other.get_parameter("b.weight"), before[2])


@pytest.mark.parametrize(
    ("saved", "here", "said"),
    [
        ({"amsgrad": True}, {}, "was saved with amsgrad=True"),
        ({"maximize": True}, {}, "was saved with maximize=True"),
        ({"bias_correction": False}, {}, "was saved with bias_correction=False"),
        ({"weight_decay": 0.1}, {"adam_w_mode": False}, "decoupled_weight_decay=True"),
    ],
)
def test_another_update_rule_is_reported_before_anything_is_written(
    saved: dict[str, Any], here: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = nn.Linear(3, 2)
    graphfsdp.save(tmp_path, model, trained(model, **saved), rng=False)
    other = nn.Linear(3, 2)
    optimizer = trained(other, **here)
    before = bits(other, optimizer)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match=said):
        graphfsdp.load(tmp_path, other, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(other, optimizer), strict=True))


def test_other_groups_and_kinds_are_reported(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "weight_decay": 0.5},
    ]
    graphfsdp.save(tmp_path, model, FusedAdam(groups), rng=False)
    other = nn.Linear(3, 2)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="in one parameter group here"):
        graphfsdp.load(tmp_path, other, FusedAdam(other.parameters()))
    sgd = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved from FusedAdam, here a SGD"):
        graphfsdp.load(tmp_path, other, sgd)
    graphfsdp.save(tmp_path, model, rng=False)
    with pytest.raises(graphfsdp.CheckpointMismatchError, match="saved without one"):
        graphfsdp.load(tmp_path, other, sgd)


def test_groups_are_matched_by_names_not_by_order(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.5}]
    groups.append({"params": [model.bias], "lr": 0.25})
    graphfsdp.save(tmp_path, model, FusedAdam(groups), rng=False)
    turned: list[dict[str, Any]] = [{"params": [other.bias]}, {"params": [other.weight]}]
    optimizer = FusedAdam(turned)
    graphfsdp.load(tmp_path, other, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]


class Fused(nn.Module):
    """Gate and up, queries, keys and values, and a gated delta net's projections, each as one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 2 * 7)
        self.qkv = nn.Linear(6, (4 + 2 + 2) * 3)
        self.in_proj = nn.Linear(6, 5 + 5 + 4 + 4 + 2 + 2, bias=False)
        self.conv = nn.Conv1d(14, 14, 3, groups=14, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc1(x).sum() + self.qkv(x).sin().sum() + self.in_proj(x).square().sum()
        return out + self.conv.weight.square().sum()


RULES = (
    swiglu("fc1.*"),
    fused_qkv("qkv.*", num_heads=4, num_query_groups=2, interleaved=True),
    gated_delta_net("in_proj.*", key_rows=5, value_rows=4, num_value_heads=2),
    gated_delta_net_conv("conv.*", key_rows=5, value_rows=4),
)


def fused_run(seed: int, *, sharded: bool) -> tuple[nn.Module, FusedAdam]:
    torch.manual_seed(seed)
    model: nn.Module = Fused()
    if sharded:
        graphfsdp.fully_shard(model)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).backward()
    optimizer.step()
    return model, optimizer


def fused_save_and_load(path: Path, source: str, num_ranks: int) -> dict[str, Tensor]:
    assert dist.get_world_size() == num_ranks
    model, optimizer = fused_run(0, sharded=True)
    expected = whole_numbers(model, optimizer)
    graphfsdp.save(path / f"{num_ranks}", model, optimizer, fused=RULES, rng=False)
    other, its_optimizer = fused_run(1, sharded=True)
    graphfsdp.load(path / (source or f"{num_ranks}"), other, its_optimizer, fused=RULES)
    found = whole_numbers(other, its_optimizer)
    if not source:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    return found


def test_fused_weights_are_members_in_the_checkpoint_whatever_the_ranks(
    tmp_path: Path, ranks2: RankPool, ranks4: RankPool
) -> None:
    """Borders between ranks fall into members, also inside one half; states follow weights."""
    four = ranks4.run(fused_save_and_load, tmp_path, "", 4)[0]
    two = ranks2.run(fused_save_and_load, tmp_path, "4", 2)[1]
    assert all(torch.equal(two[name], value) for name, value in four.items())
    model, optimizer = fused_run(2, sharded=False)  # plain tensors
    graphfsdp.load(tmp_path / "4", model, optimizer, fused=RULES)
    found = whole_numbers(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in four.items())
    manifest = read_manifest(tmp_path / "4" / "step-00000000")
    for name in ("fc1_w.weight", "fc1_v.bias", "qkv_k.weight", "in_proj_beta.weight"):
        assert f"model/{name}" in manifest.tensors
        assert f"optimizer/{name}/exp_avg" in manifest.tensors
    assert not any("fc1.weight" in key or "conv.weight" in key for key in manifest.tensors)

    class Split(nn.Module):
        """A model that never fused them reads the same checkpoint."""

        def __init__(self) -> None:
            super().__init__()
            self.fc1_w, self.fc1_v = nn.Linear(6, 7), nn.Linear(6, 7)
            self.qkv_q = nn.Linear(6, 12)

    split = Split()
    skipped = graphfsdp.load(tmp_path / "4", split, strict=False).skipped
    assert all("is in the checkpoint, but not in the model" in line for line in skipped)
    assert torch.equal(split.fc1_v.weight, four["fc1.weight "][7:])
    heads = four["qkv.weight "].view(2, 4, 3, 6)  # group, two queries and key and value, rows
    assert torch.equal(split.qkv_q.weight, heads[:, :2].reshape(12, 6))


@given(
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    num_groups=st.integers(1, 3),
    share=st.integers(1, 3),
    borders=st.lists(st.integers(0, 200), max_size=4),
)
def test_parts_of_any_rows_are_cut_into_members_and_fill_them(
    shares: list[int], num_groups: int, share: int, borders: list[int]
) -> None:
    num_rows = sum(shares) * num_groups * share
    suffixes = tuple(f"_{number}" for number in range(len(shares)))
    rule = FusedWeight("x", suffixes, tuple(shares), num_groups)
    members = members_of("x", (num_rows, 2), [rule])
    assert members is not None
    values = torch.arange(num_rows * 2).view(num_rows, 2)
    cuts = sorted({0, num_rows, *(border % (num_rows + 1) for border in borders)})
    groups = values.view(num_groups, -1, 2).split([n * share for n in shares], dim=1)
    for member, expected in zip(members, groups, strict=True):
        found = torch.full((member.num_rows, 2), -1)
        for first, end in pairwise(cuts):
            part = Part(values[first:end], (first, 0), (num_rows, 2))
            for piece in member.parts(part):
                rows = slice(piece.offsets[0], piece.offsets[0] + piece.local.shape[0])
                assert bool((found[rows] == -1).all())
                found[rows] = piece.local
        assert torch.equal(found, expected.reshape(-1, 2))


def test_sizes_that_cannot_be_cut_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 7))
    with pytest.raises(ConfigError, match=r"'0.weight' of shape \(7, 3\) cannot be cut into"):
        graphfsdp.save(tmp_path, model, fused=[swiglu("*")])
    with pytest.raises(ConfigError, match="num_query_groups must divide num_heads=4, got 3"):
        fused_qkv("*", num_heads=4, num_query_groups=3)
    with pytest.raises(ConfigError, match="as many different suffixes as rows"):
        FusedWeight("*", ("a", "a"), (1, 1))
