"""Norms by parameter, values that are not finite, tables and overlaps of shards."""

import math
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp import diagnostics
from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import ConfigError, GraphFSDPError
from graphfsdp.sharding.group import ManagedParameter
from ranks import RankPool, on_ranks
from sharding_helpers import (
    adam,
    batches,
    full_parameters,
    hybrid_net,
    make_net,
    my_part,
    raises_on_rank,
    units,
)

# One axis; two, cut over the inner ranks; two, cut over all of them.
WORLDS = [("ranks2", None), ("ranks4", "no_shard"), ("ranks4", "optim")]


def make(strategy: str = "optim_grads_params", outer: str | None = None) -> nn.Module:
    return make_net(strategy) if outer is None else hybrid_net(strategy, outer)


def trained(model: nn.Module) -> Tensor:
    """Do one backward pass and one step, with gradients left in place; return their norm."""
    with graphfsdp.capture(model, adam(model), scope="none", max_grad_norm=1.0) as step:
        step(*my_part(batches(1)[0]))
        assert step.grad_norm is not None
        return step.grad_norm


def look_at_norms(strategy: str, outer: str | None) -> None:
    model = make(strategy, outer)
    norm = trained(model)
    norms = {norm.name: norm for norm in diagnostics.parameter_norms(model)}
    wholes = full_parameters(model)
    assert list(norms) == list(wholes)
    for name, param in model.named_parameters():
        weight = float(wholes[name].double().norm())
        assert math.isclose(norms[name].weight, weight, abs_tol=1e-12)
        grad: Any = param.grad
        expected = None if grad is None else float(grad.full_tensor().double().norm())
        assert (norms[name].grad is None) == (expected is None)
        assert expected is None or norms[name].grad == pytest.approx(expected, rel=1e-12)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [norm.grad for norm in norms.values()])
    assert all(each == found[0] for each in found)
    assert None in found[0]  # a parameter that nothing uses
    total = math.sqrt(sum(grad**2 for grad in found[0] if grad is not None))
    assert float(norm) == pytest.approx(total, rel=1e-5)
    for limit, expected in ((total / 2, total), (1e9, total / 2)):
        clipped = graphfsdp.clip_grad_norm_(model, limit)
        assert float(clipped) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "strategy", "outer"),
    [("ranks2", "no_shard", None), *((r, "optim_grads_params", outer) for r, outer in WORLDS)],
)
def test_norms_are_those_of_whole_parameters_and_gradients(
    request: pytest.FixtureRequest, ranks: str, strategy: str, outer: str | None
) -> None:
    request.getfixturevalue(ranks).run(look_at_norms, strategy, outer)


def look_for_nonfinite(outer: str | None) -> None:
    model = make(outer=outer)
    trained(model)
    assert not diagnostics.find_nonfinite(model)
    held: list[Any] = [
        (name, local_part(param), param.grad)
        for name, param in model.named_parameters()
        if local_part(param).numel() > 1 and param.grad is not None
    ]
    planted: list[Any] = [held[0][0], held[-1][0]]
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        with torch.no_grad():
            held[0][1].view(-1)[0] = math.nan
            local_part(held[-1][2]).view(-1)[:2] = torch.tensor([math.inf, math.nan])
    dist.broadcast_object_list(planted, src=last)
    assert list(map(str, diagnostics.find_nonfinite(model))) == [
        f"weight of {planted[0]!r} on rank {last}: 1 NaN, 0 infinite",
        f"gradient of {planted[1]!r} on rank {last}: 1 NaN, 1 infinite",
    ]


@pytest.mark.parametrize(("ranks", "outer"), WORLDS)
def test_values_that_are_not_finite_are_found_with_parameter_and_rank(
    request: pytest.FixtureRequest, ranks: str, outer: str | None
) -> None:
    request.getfixturevalue(ranks).run(look_for_nonfinite, outer)


def table_of(outer: str | None) -> dict[str, Any]:
    model = make(outer=outer)
    table = diagnostics.shard_table(model)
    num_slices = diagnostics.check_slices(model)
    held = [buffer for unit in units(model) for buffer in unit.group.buffers]
    return {
        "table": table,
        "text": str(table),
        "num_slices": num_slices,
        "main": [buffer.main.nbytes for buffer in held],
        "names": {name for name, _ in model.named_parameters()},
        "trainable": sum(
            2 if param.requires_grad else 1
            for param in model.parameters()
            if local_part(param).numel()
        ),
    }


@pytest.mark.parametrize(("ranks", "outer"), WORLDS)
def test_table_has_every_parameter_with_its_place(
    request: pytest.FixtureRequest, ranks: str, outer: str | None
) -> None:
    results = request.getfixturevalue(ranks).run(table_of, outer)
    parts = 4 if outer == "optim" else 2
    for result in results:
        table = result["table"]
        assert {row.name for row in table.rows} == result["names"]
        assert [row.weight_bytes for row in table.buffers] == result["main"]
        assert result["num_slices"] == result["trainable"]
        for buffer in table.buffers:
            inside = [
                row for row in table.rows if (row.unit, row.buffer) == (buffer.unit, buffer.buffer)
            ]
            assert sum(row.weight_bytes for row in inside) <= buffer.weight_bytes
            assert buffer.plan.trainable == (buffer.grad_bytes > 0 or buffer.weight_bytes == 0)
        assert re.search(
            rf"\(root\) buffer \d: optim_grads_params, {parts} ranks x", result["text"]
        )
        assert "blocks.0.up.weight [24, 8]: " in result["text"]
    tables = [result["table"] for result in results[:parts]]
    sharded = {(b.unit, b.buffer) for b in tables[0].buffers if b.plan.layout.num_ranks == parts}
    assert sharded
    for rows in zip(*(table.rows for table in tables), strict=True):
        assert len({(row.name, row.offset, row.shape) for row in rows}) == 1
        if (rows[0].unit, rows[0].buffer) not in sharded:
            assert all(row == rows[0] for row in rows)
        elif math.prod(rows[0].shape):
            places = sorted((row.first_row, row.num_rows) for row in rows if row.num_rows)
            ends = [first + num_rows for first, num_rows in places]
            assert [first for first, _ in places] == [0, *ends[:-1]]
            assert ends[-1] == rows[0].shape[0]


def test_two_axes_hold_half_of_what_one_holds(ranks4: RankPool) -> None:
    inside, both = (
        sum(
            row.weight_bytes + row.grad_bytes
            for row in ranks4.run(table_of, outer)[0]["table"].buffers
        )
        for outer in ("no_shard", "optim")
    )
    # Half, and what the layout may round up: a border of 16 bytes for each buffer and kind.
    assert both <= 0.5 * inside + 16 * 2 * 8


@on_ranks("ranks2")
def test_slices_that_overlap_or_lie_elsewhere_are_named() -> None:
    """By each rank, in the words of the lowest one that has found something."""
    model = make_net("optim_grads_params")
    diagnostics.check_slices(model)
    held: dict[int, list[ManagedParameter]] = {}
    for item in (item for unit in units(model) for item in unit.group.managed):
        if item.buffer.trainable and local_part(item.param).numel() > 1:
            held.setdefault(id(item.buffer), []).append(item)
    items = next(items for items in held.values() if len(items) > 1)
    one, other = (item.param for item in items[:2])
    kept: Any = other._local_tensor  # type: ignore[attr-defined]
    overlap = "overlap by", "bytes on rank 0: an update of one would change the other"
    for local, words in (
        (local_part(one).detach(), overlap),
        (torch.zeros_like(kept), ("lies outside its flat buffer on rank 0",)),
    ):
        other._local_tensor = local  # type: ignore[attr-defined]
        with raises_on_rank(GraphFSDPError, *words):
            diagnostics.check_slices(model)
        other._local_tensor = kept  # type: ignore[attr-defined]


def test_plain_models_have_norms_too() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    weight, bias = diagnostics.parameter_norms(model)
    assert weight.weight == pytest.approx(float(model.weight.detach().double().norm()))
    assert weight.grad == pytest.approx(math.sqrt(6))
    assert bias.grad == pytest.approx(math.sqrt(2))
    assert diagnostics.find_nonfinite(model) == ()
    with torch.no_grad():
        model.bias[1] = -math.inf
    (found,) = diagnostics.find_nonfinite(model)
    assert found == diagnostics.NonFinite("bias", "weight", 0, 0, 1)
    with pytest.raises(ConfigError, match=r"call graphfsdp\.fully_shard first"):
        diagnostics.shard_table(model)
