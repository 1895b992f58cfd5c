"""Random programs that write, alias, drop and draw: replayed, also with dead memory poisoned.

A program works on registers, tensors of one shape that may share memory, and on handles, views of
them that are only written through. Then a network of random parts, with gradients, goes on from the
last register, and through trained layers.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from cpu_recording import poisoned
from helpers import OPTIMIZERS, Case, assert_same_run, run
from zoo import features

CPU = torch.device("cpu")
WIDTH = 4
NUM_CALLS = 12  # 1 warm-up, 1 capture, 10 replays


@dataclass
class Registers:
    """What a program works on."""

    net: Any
    tensors: list[Tensor]
    handles: list[Tensor] = field(default_factory=list)

    def get(self, index: int) -> Tensor:
        return self.tensors[index % len(self.tensors)]

    def put(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)


Operation = Callable[[Registers, int, int], object]


def _state(r: Registers, a: int) -> Tensor:
    state: Tensor = r.net.get_buffer(f"state{a % 2}")
    return state


def binary(r: Registers, a: int, b: int) -> None:
    kinds = (torch.add, torch.sub, torch.maximum, torch.hypot, torch.atan2)
    r.put(kinds[(a + b) % len(kinds)](r.get(a), r.get(b)))


def unary(r: Registers, a: int, b: int) -> None:
    kinds = (torch.tanh, torch.sin, torch.sigmoid, torch.neg, torch.clone, torch.square)
    r.put(kinds[b % len(kinds)](r.get(a)).clamp(-4, 4))


def write(r: Registers, a: int, b: int) -> None:
    target, other = r.get(a), r.get(b)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: target.add_(other, alpha=0.5),
        lambda: target.mul_(0.5).sub_(other),
        lambda: target.copy_(other),
        lambda: target.lerp_(other, 0.25),
        lambda: target.tanh_(),
        lambda: target.zero_(),
    )
    kinds[(a * 3 + b) % len(kinds)]()


def alias(r: Registers, a: int, b: int) -> None:
    source = r.get(a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: source,
        lambda: source.view_as(source),
        lambda: source.t().t(),
        lambda: source[:],
        lambda: source.as_strided(source.shape, source.stride(), source.storage_offset()),
        lambda: source.unsqueeze(0).squeeze(0),
    )
    r.put(kinds[b % len(kinds)]())


def handle(r: Registers, a: int, b: int) -> None:
    source = r.get(a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: source[1 : 2 + b],
        lambda: source[:, ::2],
        lambda: source.t()[b % WIDTH],
        lambda: source.diagonal(),
        lambda: source.unfold(1, 2, 2)[b % len(source)],
        lambda: source.narrow(0, b % len(source), 1).squeeze(),
        lambda: source[0:0],
    )
    r.handles.append(kinds[b % len(kinds)]())


def write_handle(r: Registers, a: int, b: int) -> None:
    if not r.handles:
        return
    target, mean = r.handles[a % len(r.handles)], r.get(b).mean()
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: target.fill_(0.25),
        lambda: target.mul_(-0.5),
        lambda: target.add_(mean),
        lambda: target.copy_(mean),
        lambda: target.uniform_(-1, 1),
    )
    kinds[b % len(kinds)]()


def draw(r: Registers, a: int, b: int) -> None:
    source = r.get(a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.rand_like(source),
        lambda: torch.randn(source.shape),
        lambda: functional.dropout(source, 0.3),
        lambda: source.normal_(0.0, 0.5),
        lambda: source + torch.bernoulli(torch.full_like(source, 0.5)),
        lambda: source[torch.randperm(len(source))],
    )
    r.put(kinds[b % len(kinds)]())


def drop(r: Registers, a: int, b: int) -> None:
    """Let go of a register, and of all handles, so that memory can be used again."""
    if len(r.tensors) > 1:
        del r.tensors[a % len(r.tensors)]
    if b % 2:
        r.handles.clear()


def swap(r: Registers, a: int, b: int) -> None:
    i, j = a % len(r.tensors), b % len(r.tensors)
    r.tensors[i], r.tensors[j] = r.tensors[j], r.tensors[i]


def layer(r: Registers, a: int, b: int) -> None:
    r.put(r.net.layers[b % 2](r.get(a)).detach())


def reduce(r: Registers, a: int, b: int) -> None:
    source = r.get(a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: source.softmax(dim=b % 2),
        lambda: source.sort(dim=b % 2).values,
        lambda: source.cumsum(dim=b % 2) * 0.2,
        lambda: source - source.mean(dim=b % 2, keepdim=True),
        lambda: functional.layer_norm(source, (WIDTH,)),
        lambda: source @ source.t() @ source * 0.01,
        lambda: torch.cat([source[3:], source[:3]]),
        lambda: torch.where(source > 0, source, r.get(b)),
    )
    r.put(kinds[b % len(kinds)]().clamp(-4, 4))


def write_state(r: Registers, a: int, b: int) -> None:
    state = _state(r, a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: state.lerp_(r.get(b).mean(dim=0).tanh(), 0.1),
        lambda: state.copy_(r.get(b)[b % len(r.get(b))].clamp(-1, 1)),
        lambda: state[1:].mul_(0.5),
        lambda: state.copy_(state.flip(0)),
    )
    kinds[b % len(kinds)]()


def read_state(r: Registers, a: int, b: int) -> None:
    r.put(r.get(b) + _state(r, a) if b % 3 else _state(r, a).expand_as(r.get(b)).clone())


def many(r: Registers, a: int, b: int) -> None:
    """Operators that read or write several tensors at once."""
    if b % 2:
        first, second = r.get(a).clone(), r.get(b).clone()
        torch._foreach_add_([first, second], [second.clone(), first.clone()], alpha=0.5)
        r.put(first.clamp_(-4, 4))
    else:
        r.put(torch.stack([r.get(a), r.get(b)]).amax(dim=0))
        low, high = r.get(a).aminmax(dim=1, keepdim=True)
        r.put((r.get(b) - low).clamp(max=1) * high.tanh())


OPERATIONS: dict[str, Operation] = {
    operation.__name__: operation
    for operation in (
        *(binary, unary, write, alias, handle, write_handle, draw, drop, swap, layer, reduce),
        *(write_state, read_state, many),
    )
}


# Parts of a network, which gradients go through.


def activate(r: Registers, a: int, b: int) -> None:
    kinds: tuple[Callable[[Tensor], Tensor], ...] = (
        functional.relu,
        functional.gelu,
        functional.silu,
        functional.softplus,
        functional.leaky_relu,
        lambda h: functional.relu(h * 1.5, inplace=True),
        lambda h: functional.hardtanh(h * 1.5, inplace=True),
        lambda h: functional.dropout(h, 0.1 + 0.1 * (a % 5)),
        lambda h: h + 0.1 * torch.randn_like(h),
    )
    r.put(kinds[b % len(kinds)](r.get(a)))


def combine(r: Registers, a: int, b: int) -> None:
    one, other = r.get(a), r.get(b)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: one + other,
        lambda: one * other.sigmoid(),
        lambda: one + other.detach().cos(),
        lambda: torch.einsum("ri,rj,rj->ri", one, other.tanh(), other.tanh()) / WIDTH,
        lambda: one + _state(r, a).clone(),
    )
    r.put(kinds[(a + b) % len(kinds)]())


def change(r: Registers, a: int, b: int) -> None:
    """Write in place what gradients go through."""
    out = r.get(a) * 1.25
    if b % 6 == 0:
        out.add_(r.get(b).detach(), alpha=0.5)
    elif b % 6 == 1:
        out.mul_(0.5).sub_(0.1)
    elif b % 6 == 2:
        out.clamp_(-1.0, 1.0 + a)
    elif b % 6 == 3:
        out[:, : 1 + a % WIDTH].mul_(1.5)
    elif b % 6 == 4:
        out.t()[a % WIDTH] = 0.25
    else:
        out.view(-1, 2, WIDTH // 2)[:, 1].add_(r.net.layers[0].bias[: WIDTH // 2])
    r.put(out)


def rearrange(r: Registers, a: int, b: int) -> None:
    h = r.get(a)
    kinds: tuple[Callable[[], Tensor], ...] = (
        lambda: h.t().contiguous().t(),
        lambda: torch.cat(h.chunk(2, dim=1)[::-1], dim=1),
        lambda: h.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
        lambda: h.unfold(1, 2, 2).flatten(1),
        lambda: torch.stack(h.roll(a, 1).flip(1).unbind(1), dim=1),
        lambda: h[:, torch.arange(WIDTH - 1, -1, -1, device=h.device)],
        lambda: h.expand(2, *h.shape).mean(dim=0),
        lambda: h.sort(dim=1).values - h.logsumexp(dim=1, keepdim=True),
    )
    r.put(kinds[b % len(kinds)]())


def transform(r: Registers, a: int, b: int) -> None:
    r.put((*r.net.layers, *r.net.norms)[b % 4](r.get(a)))


PARTS: dict[str, Operation] = {
    part.__name__: part for part in (activate, combine, change, rearrange, transform)
}


Instructions = list[tuple[str, int, int]]


class Machine(nn.Module):
    """Runs a program, and trains on what is left in the registers."""

    def __init__(self, program: Instructions, parts: Instructions) -> None:
        super().__init__()
        self.program = program
        self.parts = parts
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)])
        for index in range(2):
            self.register_buffer(f"state{index}", torch.full((WIDTH,), 0.25 * index))

    def forward(self, x: Tensor) -> Tensor:
        registers = Registers(self, [x.clone(), x * 0.5])
        with torch.no_grad():
            for name, first, second in self.program:
                OPERATIONS[name](registers, first, second)
        for name, first, second in self.parts:
            PARTS[name](registers, first, second)
        last, middle = registers.get(-1), registers.get(len(registers.tensors) // 2)
        hidden = self.layers[0](last).tanh() + self.layers[1](middle.tanh() + x)
        loss: Tensor = hidden.square().mean()
        return loss


def instructions(names: dict[str, Operation], **sizes: Any) -> Any:
    numbers = st.integers(0, 8)
    return st.lists(st.tuples(st.sampled_from(sorted(names)), numbers, numbers), **sizes)


OPTIONS = {
    "scope": st.sampled_from(["full_iteration", "full_iteration", "forward_backward"]),
    "optimizer": st.sampled_from(OPTIMIZERS),
    "microbatches": st.sampled_from([1, 1, 2, 3]),
    "max_grad_norm": st.sampled_from([None, 0.1]),
}


def check(
    program: Instructions,
    parts: Instructions,
    device: torch.device,
    *,
    poisons: bool,
    scope: str = "full_iteration",
    **options: Any,
) -> None:
    case = Case(lambda: Machine(program, parts), features(WIDTH))
    options |= {"num_steps": NUM_CALLS, "warmup_steps": 1}
    expected = run(case, "none", device, **options)
    with poisoned() if poisons else nullcontext():
        got = run(case, scope, device, **options)
    assert_same_run(expected, got)
    assert got.report.num_calls["replay"] == NUM_CALLS - 2


@hypothesis.settings(max_examples=50, derandomize=True)
@hypothesis.given(
    program=instructions(OPERATIONS, min_size=2, max_size=14),
    parts=instructions(PARTS, max_size=4),
    poisons=st.booleans(),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_random_programs_replay_as_eager_runs(
    program: Instructions, parts: Instructions, poisons: bool, options: dict[str, Any]
) -> None:
    check(program, parts, CPU, poisons=poisons, **options)


@hypothesis.settings(max_examples=30, derandomize=True)
@hypothesis.given(
    parts=instructions(PARTS, min_size=1, max_size=8), options=st.fixed_dictionaries(OPTIONS)
)
def test_random_networks_replay_as_eager_runs(
    device: torch.device, parts: Instructions, options: dict[str, Any]
) -> None:
    check([], parts, device, poisons=False, **options)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_form_of_an_operation_stands_poisoned_memory(name: str) -> None:
    """All forms in one program, between operations that make and drop memory."""
    program = [("handle", 0, 1), ("handle", 1, 2), ("read_state", 0, 1)]
    for second in range(8):
        program += [(name, second // 2, second), ("unary", second, second), ("drop", 3, 0)]
    check(program, [], CPU, poisons=True)


@pytest.mark.parametrize("name", sorted(PARTS))
def test_every_form_of_a_part_replays_as_eager_runs(name: str, device: torch.device) -> None:
    parts = [each for number in range(9) for each in ((name, -1, number), ("transform", -1, 0))]
    check([], parts, device, poisons=False)
