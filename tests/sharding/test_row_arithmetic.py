"""Arithmetic on tensors whose rows are cut unevenly: as on the whole tensor, or refused by name."""

import functools
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils import _pytree as pytree

from graphfsdp.base.torch_internals import ASKS_SUBCLASSES
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.placement import RowShard
from graphfsdp.sharding.rows.tensors import make_dtensor
from ranks import on_ranks

NUM_SAMPLES = 4
# First row of rank 1, in thirds of all rows; where it is 0 or 3, one rank has no row.
CUTS = (2, 3, 0)
# Their memory is not written, or they draw random numbers.
NO_VALUES = (
    *("empty", "rand", "normal", "dropout", "bernoulli", "multinomial", "rrelu", "cauchy"),
    *("exponential", "geometric", "uniform"),
)
# What torch says, on every rank, of an operator that its DTensor does not have for whole tensors.
REFUSALS = (
    "does not have a sharding strategy registered",
    "Sharding propagation failed",
    "got mixed torch.Tensor and DTensor",
    "its data is not allocated yet",
    "with arguments from the 'SparseCPU' backend",
)
# Of the operators, one in so many; in the named ones something was wrong once.
PART = int(os.environ.get("GRAPHFSDP_TEST_ROW_OPERATORS", "48"))
ALWAYS = ("equal", "nn.functional.cosine_embedding_loss", "mean", "max", "abs", "lerp", "norm")
FEWEST = {"right": 7000 // PART // 2, "operators": 600 // PART // 2}


@functools.cache
def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _rows(whole: Tensor, thirds: int) -> DTensor:
    num_rows = whole.shape[0] if whole.dim() else 1
    place = RowShard((0, (thirds * num_rows + 2) // 3, num_rows))
    first, count = place.rows_of(dist.get_rank())
    local = (whole if whole.dim() else whole.view(1)).detach().narrow(0, first, count).clone()
    return make_dtensor(local, _mesh(), [place], whole.shape)


def _spread(whole: Tensor, like: Tensor, thirds: int) -> DTensor:
    if whole.dim() == like.dim() and whole.shape[:1] == like.shape[:1]:
        return _rows(whole, thirds)
    return distribute_tensor(whole.detach().clone(), _mesh(), [Replicate()])


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _dense(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or leaf.layout is torch.strided


def _operators() -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        chosen = operator.name in ALWAYS or zlib.crc32(operator.name.encode()) % PART == 0
        has_values = chosen and not any(word in operator.name for word in NO_VALUES)
        if has_values and torch.float32 in operator.supported_dtypes("cpu"):
            yield operator


def _samples(operator: Any) -> list[Any]:
    try:
        found = list(operator.sample_inputs("cpu", torch.float32, requires_grad=False))
    except Exception:  # the database's own trouble (a library that is not installed)
        return []
    return [
        sample
        for sample in found
        if isinstance(sample.input, Tensor)
        and all(map(_dense, pytree.tree_leaves((sample.input, sample.args, sample.kwargs))))
    ][:NUM_SAMPLES]


def _outcome(call: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "done", call()
    except ConfigError:
        return "refused", None
    except Exception as error:
        refused = any(reason in str(error) for reason in REFUSALS)
        return "refused" if refused else f"{type(error).__name__}: {error}"[:200], None


def _differences(expected: Any, found: Any) -> str:
    ours, theirs = (
        [_full(value) for value in pytree.tree_leaves(found)],
        pytree.tree_leaves(expected),
    )
    if len(ours) != len(theirs):
        return f"{len(ours)} results instead of {len(theirs)}"
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(other, Tensor):
            try:
                torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-5)
            except AssertionError as error:
                return str(error)[:200]
        elif one != other and one == one:
            return f"{one} instead of {other}"
    return ""


def _run(call: Callable[..., Any], sample: Any, change: Callable[[Tensor], Any]) -> Any:
    args = (sample.input, sample.args, sample.kwargs)
    args = pytree.tree_map(lambda v: change(v) if isinstance(v, Tensor) else v, args)
    result = call(args[0], *args[1], **args[2])
    return result, args[0]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _sweep(calls: Iterator[tuple[str, Callable[..., Any], Any]]) -> dict[str, Any]:
    """Run each call on the whole and on rows; what all ranks have found alike."""
    seen: dict[str, Any] = {"right": set(), "refused": set(), "wrong": [], "num_right": 0}
    for name, call, sample in calls:
        with torch.random.fork_rng():
            plain = functools.partial(_run, call, sample, _copy)
            status, expected = _outcome(plain)
        if status != "done":
            continue
        for thirds in CUTS:
            change = functools.partial(_spread, like=sample.input, thirds=thirds)
            status, found = _outcome(functools.partial(_run, call, sample, change))
            if status == "done":
                status, wrong = _outcome(functools.partial(_differences, expected, found))
                status = wrong if status == "done" else status
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, status)
            if set(everyone) == {""}:
                seen["num_right"] += 1
                seen["right"].add(name)
            elif set(everyone) == {"refused"}:
                seen["refused"].add(name)
            else:
                seen["wrong"].append((name, thirds, tuple(sample.input.shape), everyone))
    return seen


def _of_the_database() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for operator in _operators():
        for sample in _samples(operator):
            yield operator.name, operator.op, sample
            if operator.inplace_variant is not None:
                yield f"{operator.name} in place", operator.inplace_variant, sample


@pytest.mark.slow
@pytest.mark.skipif(not ASKS_SUBCLASSES, reason="torch runs operators on any DTensor itself")
@pytest.mark.time_limit(120)
@on_ranks("ranks2")
def test_operators_do_on_uneven_rows_what_they_do_on_the_whole_or_are_refused() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = _sweep(_of_the_database())
    assert not seen["wrong"], (len(seen["wrong"]), seen["wrong"][:40])
    assert seen["num_right"] >= FEWEST["right"], seen["num_right"]
    assert len(seen["right"]) >= FEWEST["operators"], len(seen["right"])


def _write_views(p: Tensor) -> list[Tensor]:
    """Write into views of rows, and look at what both sides see."""
    seen = []
    view = p.t()
    view.mul_(2)
    seen += [p.clone(), view.clone()]
    p.add_(1)
    seen.append(view * 1)
    view[0].zero_()
    seen += [p.clone(), view.clone()]
    other = p.detach().clone().T
    other.div_(other.norm())
    seen += [other, other @ other.T]
    p[0].fill_(3)
    p.flatten()[5:9].neg_()
    seen.append(p.clone())
    first, second = p.t().chunk(2)
    first.add_(second.sum())
    return [*seen, p.clone(), view.clone()]


@pytest.mark.skipif(not ASKS_SUBCLASSES, reason="torch runs operators on any DTensor itself")
@on_ranks("ranks2")
def test_views_and_their_rows_see_what_is_written_into_either() -> None:
    """torch.optim.Muon writes into a transposed gradient."""
    torch.manual_seed(0)
    whole = torch.randn(5, 4)
    for thirds in CUTS:
        found = _write_views(_rows(whole, thirds))
        for index, expected in enumerate(_write_views(whole.clone())):
            torch.testing.assert_close(_full(found[index]), expected, msg=f"{thirds}: {index}")
