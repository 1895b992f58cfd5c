"""Arithmetic on tensors whose rows are cut unevenly: as on the whole tensor, or refused by name."""

import functools
import itertools
import math
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

import graphfsdp
from graphfsdp.base.torch_internals import ASKS_SUBCLASSES
from graphfsdp.errors import ConfigError
from graphfsdp.sharding.mesh import RowShard
from graphfsdp.sharding.rows import make_dtensor
from ranks import on_ranks, rank_device
from sharding_helpers import raises_on_rank

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


def _is_dense(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    layouts = {leaf.layout for leaf in leaves if isinstance(leaf, Tensor)}
    return isinstance(sample.input, Tensor) and layouts == {torch.strided}


def _of_the_database() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        chosen = operator.name in ALWAYS or zlib.crc32(operator.name.encode()) % PART == 0
        has_values = chosen and not any(word in operator.name for word in NO_VALUES)
        if not has_values or torch.float32 not in operator.supported_dtypes("cpu"):
            continue
        try:
            found = list(operator.sample_inputs("cpu", torch.float32, requires_grad=False))
        except Exception:  # the database's own trouble (a library that is not installed)
            continue
        for sample in list(filter(_is_dense, found))[:NUM_SAMPLES]:
            yield operator.name, operator.op, sample
            if operator.inplace_variant is not None:
                yield f"{operator.name} in place", operator.inplace_variant, sample


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


# Some are added up over ranks, the others are made of the whole.
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name}({dims}, keepdim={keepdim})": functools.partial(
            lambda p, name, dims, keepdim: getattr(p, name)(dim=dims, keepdim=keepdim),
            name=name,
            dims=dims,
            keepdim=keepdim,
        )
        for name in ("sum", "norm", "var")
        for dims in ((0, 1), (1,), (0,))
        for keepdim in (False, True)
    },
    **{
        name: functools.partial(lambda p, name: getattr(p, name)(), name=name)
        for name in ("sum", "mean", "std", "max", "min", "norm", "isfinite")
    },
    "norm(1)": lambda p: p.norm(1),
    "norm(0)": lambda p: torch.linalg.vector_norm(p, 0),
    "norm(inf)": lambda p: torch.linalg.vector_norm(p, math.inf),
    "max of columns": lambda p: p.max(dim=0).values,
    "any": lambda p: (p > 2).any(),
    "all(0)": lambda p: (p < 2).all(0),
}


@on_ranks("ranks2")
def test_a_truncated_normal_distribution() -> None:
    """torch draws anew as long as some number on some rank is outside."""
    model: Any = graphfsdp.fully_shard(torch.nn.Linear(7, 5).to(rank_device()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random numbers on a CPU's mesh
        for limit in (2.0, 0.5):
            torch.nn.init.trunc_normal_(model.weight, std=1.0, a=-limit, b=limit)
            whole = model.weight.full_tensor()
            assert limit / 2 < float(whole.abs().max()) <= limit
            # Below 2.13 torch draws once, and on a CPU's mesh the same on each rank.
            assert len(whole.unique()) == whole.numel() or not ASKS_SUBCLASSES


@on_ranks("ranks2")
def test_reductions_are_those_of_all_rows() -> None:
    torch.manual_seed(0)
    for dtype, special in ((torch.float32, None), (torch.float64, math.nan), (torch.bfloat16, 3.0)):
        whole = torch.randn(6, 4).to(dtype)
        if special is not None:
            whole[5, 1] = special
        for thirds, (name, reduce) in itertools.product(CUTS, REDUCTIONS.items()):
            found, expected = _full(reduce(_rows(whole, thirds))), reduce(whole)
            assert found.dtype == expected.dtype
            message = f"{name} of {dtype} with {special}, {thirds} thirds on rank 0"
            torch.testing.assert_close(found, expected, equal_nan=True, msg=message)


OPTIM: Any = torch.optim


def _muon_steps(values: Any) -> None:
    param = torch.nn.Parameter(values)
    param.grad = values.clone()
    OPTIM.Muon([param]).step()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.t": lambda p: p.t(),
    "aten.mm": lambda p: p @ p,
    "aten.view": lambda p: p.view(-1),
    "aten.select": lambda p: p[0],
    "aten.index": lambda p: p[torch.tensor([0])],
    "aten.cumsum": lambda p: p.cumsum(0),
    "aten.sort": lambda p: p.sort(),
    "aten.cat": lambda p: torch.cat([p, p]),
    "aten.argmax": lambda p: p.argmax(),
    "aten.prod": lambda p: p.prod(),
    "aten._softmax": lambda p: p.softmax(0),
    "aten.": _muon_steps,
}


@on_ranks("ranks2")
def test_what_is_not_done_on_rows_is_refused_by_name_on_all_ranks() -> None:
    whole = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for thirds, (name, call) in itertools.product(CUTS, REFUSED.items()):
        with raises_on_rank(ConfigError, name, "param.full_tensor()"):
            call(_rows(whole, thirds))
        call(_full(_rows(whole, thirds)))  # what the remedy says
    with raises_on_rank(ConfigError, "aten.add", "operands that have other rows"):
        _rows(whole, 2) + _rows(whole, 3)
    with raises_on_rank(ConfigError, "aten.add", "DTensor.from_local"):
        _rows(whole, 2) + whole


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adadelta": OPTIM.Adadelta,
    "Adagrad": OPTIM.Adagrad,
    "Adam": functools.partial(OPTIM.Adam, weight_decay=0.1, amsgrad=True),
    "AdamW": OPTIM.AdamW,
    "Adamax": OPTIM.Adamax,
    "ASGD": functools.partial(OPTIM.ASGD, t0=1),
    "NAdam": OPTIM.NAdam,
    "RAdam": OPTIM.RAdam,
    "RMSprop": functools.partial(OPTIM.RMSprop, centered=True, momentum=0.5),
    "Rprop": OPTIM.Rprop,
    "SGD": functools.partial(OPTIM.SGD, momentum=0.9, nesterov=True),
}
WAYS: tuple[tuple[str, dict[str, bool]], ...] = (
    *((name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (False, True)),
    *((name, {"fused": True}) for name in ("Adam", "AdamW", "Adagrad")),
    *((name, {}) for name in OPTIMIZERS),
)


@pytest.mark.parametrize("thirds", CUTS)
@on_ranks("ranks2")
def test_optimizers_of_torch_step_on_rows_as_on_the_whole(thirds: int) -> None:
    torch.manual_seed(0)
    wholes, grads = torch.randn(2, 6, 4).unbind(), torch.randn(3, 2, 6, 4)
    for name, options in WAYS:
        trained = []
        for change in (_copy, functools.partial(_rows, thirds=thirds)):
            params = [torch.nn.Parameter(change(whole)) for whole in wholes]
            optimizer = OPTIMIZERS[name](params, lr=0.1, **options)
            for of_step in grads:
                for param, grad in zip(params, of_step, strict=True):
                    param.grad = change(grad)
                optimizer.step()
            trained.append([_full(param.detach()) for param in params])
        for found, expected in zip(trained[1], trained[0], strict=True):
            torch.testing.assert_close(found, expected, msg=f"{name}, {options}")


@on_ranks("ranks2")
def test_gradients_of_several_uses_are_cut_by_the_same_rows() -> None:
    whole = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for thirds in CUTS:
        rows: Any = _rows(whole, thirds).requires_grad_()
        loss = (rows.full_tensor() ** 2).sum() + rows.full_tensor().sum()
        loss.backward()
        assert rows.grad.placements == rows.placements
        torch.testing.assert_close(rows.grad.full_tensor(), 2 * whole + 1)
