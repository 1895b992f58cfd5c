"""Norms by parameter, values that are not finite, tables of shards."""

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
from graphfsdp.diagnostics import named_units
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.group import ManagedParameter
from ranks import RankPool, on_ranks
from sharding_helpers import (
    adam,
    batches,
    check_slices,
    full_parameters,
    hybrid_net,
    make_net,
    my_part,
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
    check_slices(model)
    items = [(name, item) for name, unit in named_units(model) for item in unit.group.managed]
    held = {f"{name}.{item.name}".lstrip("."): item for name, item in items}
    return {
        "text": diagnostics.shard_table(model),
        "bytes": sum(
            buffer.main.nbytes + (0 if buffer.grad is None else buffer.grad.nbytes)
            for unit in units(model)
            for buffer in unit.group.buffers
        ),
        "rows": {
            name: (
                item.buffer.sharded,
                item.slot.shape,
                item.slot.offset,
                item.buffer.local_rows(item.slot),
                local_part(item.param).shape[0] if item.slot.shape else 1,
            )
            for name, item in held.items()
        },
        "names": {name for name, _ in model.named_parameters()},
    }


@pytest.mark.parametrize(("ranks", "outer"), WORLDS)
def test_table_has_every_parameter_with_its_place(
    request: pytest.FixtureRequest, ranks: str, outer: str | None
) -> None:
    results = request.getfixturevalue(ranks).run(table_of, outer)
    parts = 4 if outer == "optim" else 2
    for result in results:
        lines = result["text"].splitlines()
        assert re.search(
            rf"\(root\) buffer \d: optim_grads_params, {parts} ranks x", result["text"]
        )
        assert result["rows"].keys() == result["names"]
        for name, (_, shape, offset, here, num_rows) in result["rows"].items():
            (line,) = [line for line in lines if f" {name} [" in line]
            assert line.split()[0] == f"{offset:,}"
            assert f" {name} {list(shape)}: " in line
            rows = f"rows [{here.first_row}, {here.first_row + here.num_rows})"
            assert f": {rows if here.num_rows else 'no rows'} here" in line
            assert num_rows == here.num_rows or not math.prod(shape)
    tables = [result["rows"] for result in results[:parts]]
    assert any(sharded for sharded, *_ in tables[0].values())
    for name, (sharded, shape, offset, *_) in tables[0].items():
        found = [table[name] for table in tables]
        assert all(each[:3] == (sharded, shape, offset) for each in found)
        places = sorted((own.first_row, own.num_rows) for *_, own, _ in found if own.num_rows)
        if sharded and math.prod(shape):
            ends = [first + num_rows for first, num_rows in places]
            assert [first for first, _ in places] == [0, *ends[:-1]]
            assert ends[-1] == (shape or (1,))[0]


def test_two_axes_hold_half_of_what_one_holds(ranks4: RankPool) -> None:
    inside, both = (ranks4.run(table_of, outer)[0]["bytes"] for outer in ("no_shard", "optim"))
    # Half, and what the layout may round up: a border of 16 bytes for each buffer and kind.
    assert both <= 0.5 * inside + 16 * 2 * 8


@on_ranks("ranks2")
def test_slices_that_overlap_are_seen() -> None:
    model = make_net("optim_grads_params")
    check_slices(model)
    held: dict[int, list[ManagedParameter]] = {}
    for item in (item for unit in units(model) for item in unit.group.managed):
        if item.buffer.trainable and local_part(item.param).numel() > 1:
            held.setdefault(id(item.buffer), []).append(item)
    items = next(items for items in held.values() if len(items) > 1)
    one, other = (item.param for item in items[:2])
    for local in (local_part(one).detach(), torch.zeros_like(local_part(other).detach())):
        other._local_tensor = local  # type: ignore[attr-defined]
        with pytest.raises(AssertionError):
            check_slices(model)


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
