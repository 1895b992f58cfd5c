"""Torch's own operator database, gradients included.

Each operator replays bit for bit or is refused by name, and computes into given memory bit for bit
what it returns otherwise. By default a part of the operators, so that the suite stays quick;
GRAPHFSDP_ALL_OPERATORS=1 takes all of them (about five minutes).
"""

import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import graphfsdp
from graphfsdp._capture.cpu.calls import call_into, can_write_into
from graphfsdp._capture.trace.out_forms import short_name
from graphfsdp.base.op_tensors import is_empty

pytest.importorskip("expecttest", reason="torch's operator database needs the expecttest package")

NUM_SAMPLES = 2
NUM_LAID_OUT = 3  # samples, each in three layouts
TAKES_ALL = bool(os.environ.get("GRAPHFSDP_ALL_OPERATORS"))
NUM_CALLS = 5  # warm-up, capture, three replays


class OneOperator(nn.Module):
    """An operator on parameters and buffers made of one sample of the database."""

    def __init__(self, operator: Any, sample: Any) -> None:
        super().__init__()
        self.operator = operator
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves: list[Any] = []
        for index, leaf in enumerate(leaves):
            name = f"leaf{index}"
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(name, nn.Parameter(leaf.detach().clone()))
            elif isinstance(leaf, Tensor):
                self.register_buffer(name, leaf.detach().clone())
            else:
                name = ""
            self.leaves.append(name or leaf)
        self.names = {f"leaf{index}" for index in range(len(leaves))}

    def forward(self, factor: Tensor) -> Tensor:
        leaves = []
        for leaf in self.leaves:
            value = getattr(self, leaf) if isinstance(leaf, str) and leaf in self.names else leaf
            leaves.append(value * factor if isinstance(value, nn.Parameter) else value)
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = pytree.tree_leaves(self.operator(first, *args, **kwargs))
        total = factor.double() * 0
        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                real = torch.view_as_real(result) if result.is_complex() else result
                total = total + torch.nan_to_num(real.double().sum())
        return total


def operators(part: int, salt: bytes = b"") -> Iterator[Any]:
    """Yield all operators, or one of ``part``; another choice for another ``salt``."""
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        chosen = TAKES_ALL or zlib.crc32(salt + operator.name.encode()) % part == 0
        if chosen and torch.float32 in operator.supported_dtypes("cpu"):
            yield operator


def samples(operator: Any) -> list[Any]:
    differentiable = operator.supports_autograd
    try:
        return list(operator.sample_inputs("cpu", torch.float32, requires_grad=differentiable))
    except Exception:  # the database's own trouble (a library that is not installed)
        return []


def _is_dense(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return all(leaf.layout is torch.strided for leaf in leaves if isinstance(leaf, Tensor))


def train(operator: Any, sample: Any, scope: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = OneOperator(operator.op, sample)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with graphfsdp.capture(model, optimizer, scope=scope, warmup_steps=1) as step:
        losses = [step(torch.tensor(1 + 0.01 * index)) for index in range(NUM_CALLS)]
    return [*losses, *(param.detach() for param in model.parameters())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)


@pytest.mark.time_limit(900)
def test_gradients_of_torchs_operators_replay_bit_for_bit_or_are_refused() -> None:
    num_equal, refused, different = 0, set(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the operators, about their own arguments
        for operator in operators(24):
            found = samples(operator)[:NUM_SAMPLES] if operator.supports_autograd else []
            for sample in filter(_is_dense, found):
                try:
                    eager = train(operator, sample, "none")
                except Exception:  # nothing to train: not a case for a capture
                    continue
                try:
                    replayed = train(operator, sample, "full_iteration")
                except graphfsdp.CaptureError:
                    refused.add(operator.name)
                    continue
                num_equal += 1
                if not same(eager, replayed):
                    different.append(operator.name)
    assert not different
    assert num_equal > 40
    assert len(refused) < 25, refused


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare contents and layout; NaNs are equal to themselves."""
    if one.stride() != other.stride() or one.dtype != other.dtype:
        return False
    bits = [item.contiguous().flatten().view(torch.uint8) for item in (one, other)]
    return torch.equal(*bits)


class Twins(TorchDispatchMode):
    """Repeats every operator that has a form for it into memory full of NaNs, and compares."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        self.different: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        results = list(result) if isinstance(result, list | tuple) else [result]
        if (
            can_write_into(func)
            and not is_empty(func)
            and all(map(plain, results))
            and not any(item.is_conj() or item.is_neg() for item in results)
        ):
            self.repeat(func, args, named, results)
        return result

    def repeat(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], results: list[Tensor]
    ) -> None:
        namespace: dict[str, object] = {}

        def constant(item: object, prefix: str) -> str:
            name = f"{prefix}{len(namespace)}"
            namespace[name] = item
            return name

        outs = []
        for item in results:
            out = torch.empty_strided(item.shape, item.stride(), dtype=item.dtype)
            torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage()).fill_(255)
            outs.append(out)
        line = call_into(
            op,
            [constant(item, "a") for item in args],
            {name: constant(item, "k") for name, item in kwargs.items()},
            [constant(out, "o") for out in outs],
            constant,
        )
        name = short_name(op)
        try:
            with torch._C._AutoDispatchBelowAutograd():
                eval(line, namespace)
        except Exception as error:  # whatever it is, the operator itself has worked
            self.different.add(f"{name} in {line}: {error}")
        self.seen.add(name)
        if not all(map(same_bits, outs, results)):
            self.different.add(f"{name} in {line}")


def plain(item: object) -> bool:
    return isinstance(item, Tensor) and item.layout is torch.strided


def laid_out(leaf: Any, layout: int) -> Any:
    """Return a copy of a tensor in another memory layout."""
    if not isinstance(leaf, Tensor) or not plain(leaf) or leaf.dim() < 2 or not layout:
        return leaf
    data = leaf.detach()
    if layout == 1:
        data = data.transpose(0, -1).contiguous().transpose(0, -1)
    else:
        data = torch.stack([data, data], dim=-1)[..., 0]
    return data.requires_grad_(leaf.requires_grad)


def cases(operator: Any) -> Iterator[tuple[Any, Any, Any]]:
    for sample in samples(operator)[:NUM_LAID_OUT]:
        for layout in range(3):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            yield pytree.tree_unflatten([laid_out(leaf, layout) for leaf in leaves], spec)


@pytest.mark.time_limit(900)
def test_what_is_computed_into_place_has_the_bits_of_what_is_returned() -> None:
    twins = Twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the operators, about their own arguments
        for operator in operators(20, b"x"):
            for first, args, kwargs in cases(operator):
                try:
                    with twins:
                        leaves = pytree.tree_leaves(operator.op(first, *args, **kwargs))
                        results = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
                        if results:
                            total = sum(x.abs().double().sum() for x in results)
                            assert isinstance(total, Tensor)
                            total.backward()
                except Exception:  # the sample does not run in this layout, with or without us
                    continue
    assert not twins.different
    assert len(twins.seen) >= 35, sorted(twins.seen)
