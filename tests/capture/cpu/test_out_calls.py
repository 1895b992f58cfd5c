"""Operators that compute into given memory: bit for bit what they return otherwise.

Runs torch's own operator database, forward and backward, with inputs in several layouts. By
default a part of it, so that the suite stays quick; GRAPHFSDP_ALL_OPERATORS=1 takes all of it.
"""

import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphfsdp._capture.cpu.calls import call_into, can_write_into, short_name
from graphfsdp.base.op_tensors import is_empty

PART = 1 if os.environ.get("GRAPHFSDP_ALL_OPERATORS") else 12
NUM_SAMPLES = 3


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


def operators() -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        chosen = zlib.crc32(b"x" + operator.name.encode()) % PART == 0
        if chosen and torch.float32 in operator.supported_dtypes("cpu"):
            yield operator


def cases(operator: Any) -> Iterator[tuple[Any, Any, Any]]:
    try:
        samples = list(
            operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd)
        )
    except Exception:  # the database's own trouble (a library that is not installed)
        return
    for sample in samples[:NUM_SAMPLES]:
        for layout in range(3):
            leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            yield pytree.tree_unflatten([laid_out(leaf, layout) for leaf in leaves], spec)


@pytest.mark.time_limit(900)
def test_what_is_computed_into_place_has_the_bits_of_what_is_returned() -> None:
    pytest.importorskip("expecttest", reason="torch's operator database needs it")
    twins = Twins()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the operators, about their own arguments
        for operator in operators():
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
