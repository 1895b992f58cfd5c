"""The global norm and clipping over whole and sharded tensors, on several ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphfsdp
from graphfsdp.base.norms import global_norm
from helpers import OpNames
from ranks import on_ranks, rank_device, world_group

CPU = torch.device("cpu")


def tensors(
    seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def norm_of(parts: list[Tensor]) -> float:
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


def test_nothing_has_norm_zero() -> None:
    norm = global_norm([], {}, CPU)
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    assert norm.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_whole_tensors_have_torchs_norm(dtype: torch.dtype) -> None:
    parts = tensors(0, (5, 3), (7,), (), (0, 2), dtype=dtype)
    got = global_norm(parts, {}, CPU)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(norm_of(parts), rel=2e-6)


def test_half_precision_does_not_overflow() -> None:
    parts = [torch.full((100,), 6e4, dtype=torch.float16)]
    assert global_norm(parts, {}, CPU).item() == pytest.approx(norm_of(parts), rel=1e-5)


def mixed_norms() -> float:
    """Whole tensors on every rank, rows on each, and no row at all on the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    whole = tensors(7, (3, 3), (2,))
    rows = [tensors(10 + r, (r + 1, 4), (r, 2)) if r != last else [] for r in range(last + 1)]
    on = rank_device()
    local = [part.to(on) for part in rows[rank]]
    with OpNames() as seen:
        got = global_norm([part.to(on) for part in whole], {(world_group(),): local}, on)
    assert sum("all_reduce" in name for name in seen.names) == 1
    expected = norm_of([*whole, *(part for parts in rows for part in parts)])
    assert float(got) == pytest.approx(expected, rel=2e-6)
    return float(got)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_of_all_ranks_count_once(request: pytest.FixtureRequest, num_ranks: int) -> None:
    results = request.getfixturevalue(f"ranks{num_ranks}").run(mixed_norms)
    assert len(set(results)) == 1, "ranks disagree"


@on_ranks("ranks2")
def test_infinity_and_nan_of_one_rank_reach_every_rank() -> None:
    for value, is_seen in ((math.inf, math.isinf), (math.nan, math.isnan)):
        rows = [torch.tensor([1.0, value if dist.get_rank() == 1 else 2.0], device=rank_device())]
        assert is_seen(float(global_norm([], {(world_group(),): rows}, rank_device())))


def test_clipping_refuses_a_limit_that_is_not_positive_and_a_list() -> None:
    with pytest.raises(graphfsdp.ConfigError, match="max_norm must be a positive number, got 0"):
        graphfsdp.clip_grad_norm_(nn.Linear(2, 2), 0.0)
    with pytest.raises(graphfsdp.ConfigError, match=r"got list.*clip_grad_norm_\(model"):
        graphfsdp.clip_grad_norm_([*nn.Linear(2, 2).parameters()], 1.0)  # type: ignore[arg-type]
