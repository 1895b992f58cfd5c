"""The description of a recorded program: nodes, memory, lifetimes, and what it costs to keep."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpu_recording import record

KIB = 1024


def facts_of(iterate: Callable[[], list[Tensor]]) -> Any:
    return record(iterate)[0].facts.program


def test_live_bytes_are_what_each_node_still_needs() -> None:
    x = torch.ones(256)

    def iterate() -> list[Tensor]:
        a = x.exp()  # node 0: a
        b = a.sin()  # node 1: a, b
        c = b.cos()  # node 2: b, c (a is over)
        return [c.sum()]  # node 3: c, the sum

    program = facts_of(iterate)
    assert [node.op for node in program.nodes] == [
        f"aten.{op}.default" for op in ("exp", "sin", "cos", "sum")
    ]
    assert program.live_bytes() == [KIB, 2 * KIB, 2 * KIB, KIB + 4]
    result = [buffer for buffer in program.buffers if buffer.role.name == "OUTPUT"]
    assert [(buffer.first, buffer.last) for buffer in result] == [(3, 4)]


def test_constant_tensors_are_shown_by_value() -> None:
    x = torch.ones(2)

    def iterate() -> list[Tensor]:
        return [x * torch.tensor([2.5, 3.5]) + torch.arange(9.0)[:2] + torch.tensor([0.0] * 9)[:2]]

    baked = [a.value for n in facts_of(iterate).nodes for a in n.arguments if a.baked]
    assert "[2.5, 3.5]" in baked
    assert "a constant float32[9]" in baked


def test_the_description_keeps_no_tensor_alive_and_stays_small() -> None:
    x = torch.ones(64, 64)

    def iterate() -> list[Tensor]:
        y = x
        for _ in range(400):
            y = torch.relu(y + 1)
        return [y.sum()]

    program = facts_of(iterate)
    assert len(program.nodes) == 801
    seen: set[int] = set()
    todo: list[Any] = [program]
    num_bytes = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | str):
            continue
        seen.add(id(item))
        num_bytes += sys.getsizeof(item)
        assert not isinstance(item, Tensor | torch.UntypedStorage | nn.Module)
        if type(item).__module__.startswith(("builtins", "array", "graphfsdp")):
            todo.extend(gc.get_referents(item))
    assert num_bytes < 801 * 500  # a node and its buffer; texts and arguments are shared
