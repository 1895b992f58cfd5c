"""Random programs that write, alias, drop and draw, and torch's own operator database, replayed.

A program works on registers, tensors of one shape that may share memory, and on handles, views of
them that are only written through. Then a network of random parts, with gradients, goes on from the
last register, and through trained layers. Dead memory is poisoned for some.

Of the database, gradients included, each operator replays bit for bit or is refused by name. By
default a part of the operators, so that the suite stays quick; GRAPHFSDP_ALL_OPERATORS=1 takes all
of them (about five minutes).
"""

import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import graphfsdp
from cpu_recording import poisoned
from helpers import OPTIMIZERS, Case, assert_same_run, run, same_bits
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


class Operands(NamedTuple):
    """Two registers, a buffer and layers of the network, and the second number."""

    x: Tensor
    y: Tensor
    state: Tensor
    layers: Any
    b: int


Form = Callable[[Operands], Any]
Operation = Callable[[Registers, int, int], object]


def operands(r: Registers, a: int, b: int) -> Operands:
    layers = (*r.net.layers, *r.net.norms)
    return Operands(r.get(a), r.get(b), r.net.get_buffer(f"state{a % 2}"), layers, b)


def written(*forms: Form) -> Operation:
    """Return an operation that has several forms, of which its second number chooses."""
    return lambda r, a, b: forms[b % len(forms)](operands(r, a, b))


def put(*forms: Form) -> Operation:
    """Return one whose result is a register."""
    return lambda r, a, b: r.tensors.append(written(*forms)(r, a, b))  # type: ignore[arg-type]


def held(*forms: Form) -> Operation:
    """Return one whose result is a handle."""
    return lambda r, a, b: r.handles.append(written(*forms)(r, a, b))  # type: ignore[arg-type]


def written_by_handle(*forms: Form) -> Operation:
    """Return one whose first operand is a handle, and the second a number."""

    def write(r: Registers, a: int, b: int) -> None:
        if r.handles:
            target = r.handles[a % len(r.handles)]
            forms[b % len(forms)](operands(r, a, b)._replace(x=target, y=r.get(b).mean()))

    return write


def drop(r: Registers, a: int, b: int) -> None:
    """Let go of a register, and of all handles, so that memory can be used again."""
    if len(r.tensors) > 1:
        del r.tensors[a % len(r.tensors)]
    if b % 2:
        r.handles.clear()


def swap(r: Registers, a: int, b: int) -> None:
    i, j = a % len(r.tensors), b % len(r.tensors)
    r.tensors[i], r.tensors[j] = r.tensors[j], r.tensors[i]


def many(r: Registers, a: int, b: int) -> None:
    """Operators that read or write several tensors at once."""
    if b % 2:
        first, second = r.get(a).clone(), r.get(b).clone()
        torch._foreach_add_([first, second], [second.clone(), first.clone()], alpha=0.5)
        r.tensors.append(first.clamp_(-4, 4))
    else:
        r.tensors.append(torch.stack([r.get(a), r.get(b)]).amax(dim=0))
        low, high = r.get(a).aminmax(dim=1, keepdim=True)
        r.tensors.append((r.get(b) - low).clamp(max=1) * high.tanh())


OPERATIONS: dict[str, Operation] = {
    "binary": put(
        lambda o: torch.add(o.x, o.y),
        lambda o: torch.maximum(o.x, o.y),
        lambda o: torch.hypot(o.x, o.y),
    ),
    "unary": put(
        lambda o: o.x.tanh(),
        lambda o: o.x.neg(),
        lambda o: o.x.clone(),
        lambda o: o.x.square().clamp(max=4),
    ),
    "write": written(
        lambda o: o.x.add_(o.y, alpha=0.5),
        lambda o: o.x.mul_(0.5).sub_(o.y),
        lambda o: o.x.copy_(o.y),
        lambda o: o.x.lerp_(o.y, 0.25),
        lambda o: o.x.zero_(),
    ),
    "alias": put(
        lambda o: o.x,
        lambda o: o.x.view_as(o.x),
        lambda o: o.x.t().t(),
        lambda o: o.x[:],
        lambda o: o.x.as_strided(o.x.shape, o.x.stride(), o.x.storage_offset()),
        lambda o: o.x.unsqueeze(0).squeeze(0),
    ),
    "handle": held(
        lambda o: o.x[1 : 2 + o.b],
        lambda o: o.x[:, ::2],
        lambda o: o.x.t()[o.b % WIDTH],
        lambda o: o.x.diagonal(),
        lambda o: o.x.unfold(1, 2, 2)[o.b % len(o.x)],
        lambda o: o.x.narrow(0, o.b % len(o.x), 1).squeeze(),
        lambda o: o.x[0:0],
    ),
    "write_handle": written_by_handle(
        lambda o: o.x.fill_(0.25),
        lambda o: o.x.mul_(-0.5),
        lambda o: o.x.add_(o.y),
        lambda o: o.x.copy_(o.y),
        lambda o: o.x.uniform_(-1, 1),
    ),
    "draw": put(
        lambda o: torch.rand_like(o.x),
        lambda o: torch.randn(o.x.shape),
        lambda o: functional.dropout(o.x, 0.3),
        lambda o: o.x.normal_(0.0, 0.5),
        lambda o: o.x + torch.bernoulli(torch.full_like(o.x, 0.5)),
        lambda o: o.x[torch.randperm(len(o.x))],
    ),
    "drop": drop,
    "swap": swap,
    "layer": put(lambda o: o.layers[o.b % 2](o.x).detach()),
    "reduce": put(
        lambda o: o.x.softmax(dim=o.b % 2),
        lambda o: o.x.sort(dim=o.b % 2).values,
        lambda o: o.x.cumsum(dim=o.b % 2) * 0.2,
        lambda o: o.x - o.x.mean(dim=o.b % 2, keepdim=True),
        lambda o: functional.layer_norm(o.x, (WIDTH,)),
        lambda o: (o.x @ o.x.t() @ o.x * 0.01).clamp(-4, 4),
        lambda o: torch.cat([o.x[3:], o.x[:3]]),
        lambda o: torch.where(o.x > 0, o.x, o.y),
    ),
    "write_state": written(
        lambda o: o.state.lerp_(o.y.mean(dim=0).tanh(), 0.1),
        lambda o: o.state.copy_(o.y[o.b % len(o.y)].clamp(-1, 1)),
        lambda o: o.state[1:].mul_(0.5),
        lambda o: o.state.copy_(o.state.flip(0)),
    ),
    "read_state": put(
        lambda o: o.state.expand_as(o.y).clone(),
        lambda o: o.y + o.state,
    ),
    "many": many,
}


def changed(*forms: Callable[[Tensor, Operands], object]) -> Operation:
    """Return an operation that writes in place what gradients go through."""

    def change(r: Registers, a: int, b: int) -> None:
        out = r.get(a) * 1.25
        forms[b % len(forms)](out, operands(r, a, b))
        r.tensors.append(out)

    return change


# Parts of a network, which gradients go through.
PARTS: dict[str, Operation] = {
    "activate": put(
        lambda o: functional.relu(o.x),
        lambda o: functional.gelu(o.x),
        lambda o: functional.relu(o.x * 1.5, inplace=True),
        lambda o: functional.dropout(o.x, 0.3),
        lambda o: o.x + 0.1 * torch.randn_like(o.x),
    ),
    "combine": put(
        lambda o: o.x + o.y,
        lambda o: o.x * o.y.sigmoid(),
        lambda o: o.x + o.y.detach().cos(),
        lambda o: torch.einsum("ri,rj,rj->ri", o.x, o.y.tanh(), o.y.tanh()) / WIDTH,
        lambda o: o.x + o.state.clone(),
    ),
    "change": changed(
        lambda out, o: out.add_(o.y.detach(), alpha=0.5),
        lambda out, o: out.mul_(0.5).sub_(0.1),
        lambda out, o: out.clamp_(-1.0, 1.5),
        lambda out, o: out[:, : 1 + o.b % WIDTH].mul_(1.5),
        lambda out, o: out.t()[o.b % WIDTH].fill_(0.25),
        lambda out, o: out.view(-1, 2, WIDTH // 2)[:, 1].add_(o.layers[0].bias[: WIDTH // 2]),
    ),
    "rearrange": put(
        lambda o: o.x.t().contiguous().t(),
        lambda o: torch.cat(o.x.chunk(2, dim=1)[::-1], dim=1),
        lambda o: o.x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
        lambda o: o.x.unfold(1, 2, 2).flatten(1),
        lambda o: torch.stack(o.x.roll(o.b, 1).flip(1).unbind(1), dim=1),
        lambda o: o.x[:, torch.arange(WIDTH - 1, -1, -1, device=o.x.device)],
        lambda o: o.x.expand(2, *o.x.shape).mean(dim=0),
        lambda o: o.x.sort(dim=1).values - o.x.logsumexp(dim=1, keepdim=True),
    ),
    "transform": put(lambda o: o.layers[o.b % 4](o.x)),
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


NUM_SAMPLES = 3  # each in another memory layout
TAKES_ALL = bool(os.environ.get("GRAPHFSDP_ALL_OPERATORS"))
NUM_CALLS_OF_ONE = 5  # warm-up, capture, three replays


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
    pytest.importorskip("expecttest", reason="torch's operator database needs that package")
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
        losses = [step(torch.tensor(1 + 0.01 * index)) for index in range(NUM_CALLS_OF_ONE)]
    return [*losses, *(param.detach() for param in model.parameters())]


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
                if not all(map(same_bits, eager, replayed)):
                    different.append(operator.name)
    assert not different
    assert num_equal > 40
    assert len(refused) < 25, refused
