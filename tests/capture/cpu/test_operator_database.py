"""Torch's own operator database, gradients included.

Each operator replays bit for bit, where it computes into memory that was planned for it as well, or
is refused by name. By default a part of the operators, so that the suite stays quick;
GRAPHFSDP_ALL_OPERATORS=1 takes all of them (about five minutes).
"""

import os
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphfsdp

pytest.importorskip("expecttest", reason="torch's operator database needs the expecttest package")

NUM_SAMPLES = 3  # each in another memory layout
TAKES_ALL = bool(os.environ.get("GRAPHFSDP_ALL_OPERATORS"))
NUM_CALLS = 5  # warm-up, capture, three replays


class OneOperator(nn.Module):
    """An operator on parameters and buffers made of one sample of the database."""

    def __init__(self, operator: Any, sample: Any, layout: int) -> None:
        super().__init__()
        self.operator = operator
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves: list[Any] = []
        for index, leaf in enumerate(leaves):
            name = f"leaf{index}"
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.register_parameter(name, nn.Parameter(laid_out(leaf, layout)))
            elif isinstance(leaf, Tensor):
                self.register_buffer(name, laid_out(leaf, layout))
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


def laid_out(tensor: Tensor, layout: int) -> Tensor:
    """Return a copy of a tensor: as it is, transposed, or with gaps."""
    data = tensor.detach()
    if layout == 1 and data.dim() > 1:
        return data.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2 and data.dim() > 1:
        return torch.stack([data, data], dim=-1)[..., 0]
    return data.clone()


def operators() -> Iterator[Any]:
    """Yield all operators, or each 24th."""
    from torch.testing._internal.common_methods_invocations import op_db

    for operator in op_db:
        chosen = TAKES_ALL or zlib.crc32(operator.name.encode()) % 24 == 0
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


def train(operator: Any, sample: Any, layout: int, scope: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = OneOperator(operator.op, sample, layout)
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
        for operator in operators():
            found = samples(operator)[:NUM_SAMPLES] if operator.supports_autograd else []
            for layout, sample in enumerate(filter(_is_dense, found)):
                try:
                    eager = train(operator, sample, layout, "none")
                except Exception:  # nothing to train: not a case for a capture
                    continue
                try:
                    replayed = train(operator, sample, layout, "full_iteration")
                except graphfsdp.CaptureError:
                    refused.add(operator.name)
                    continue
                num_equal += 1
                if not same(eager, replayed):
                    different.append(operator.name)
    assert not different
    assert num_equal > 40
    assert len(refused) < 25, refused
