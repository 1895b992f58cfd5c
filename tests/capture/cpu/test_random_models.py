"""Random small networks: recorded once, replayed ten times, equal to eager bit for bit."""

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from helpers import Case, assert_same_run, run
from zoo import features
from zoo_models import WIDTH

NUM_LAYERS = 3  # layers that instructions share
NUM_STATES = 2


Instruction = tuple[str, int, int]  # the name of an operation, and two numbers that it may use


class RandomNet(nn.Module):
    """Runs instructions on a hidden state [R, WIDTH]; results of all stay at hand."""

    def __init__(self, program: list[Instruction]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)])
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        for index in range(NUM_STATES):
            self.register_buffer(f"state{index}", torch.full((WIDTH,), 0.1 * index))

    def state(self, index: int) -> Tensor:
        return self.get_buffer(f"state{index % NUM_STATES}")

    def forward(self, x: Tensor) -> Tensor:
        results = [x, self.layers[0](x)]
        for name, first, second in self.program:
            results.append(OPERATIONS[name](self, results, first, second))
        total = results[-1].tanh() * self.gain + 0.1 * results[len(results) // 2].tanh()
        loss: Tensor = total.float().square().mean()
        return loss


def linear(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    out: Tensor = net.layers[a % NUM_LAYERS](r[-1])
    return out


def activation(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    kinds: list[Callable[[Tensor], Tensor]] = [
        functional.relu,
        functional.gelu,
        torch.tanh,
        torch.sigmoid,
        functional.silu,
        functional.softplus,
        functional.leaky_relu,
        lambda h: functional.relu(h * 1.5, inplace=True),
        lambda h: functional.hardtanh(h * 1.5, inplace=True),
    ]
    return kinds[a % len(kinds)](r[-1])


def norm(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    out: Tensor = net.norms[a % 2](r[-1])
    return out


def dropout(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    return functional.dropout(r[-1], 0.1 + 0.1 * (a % 5), inplace=False)


def noise(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    made = [torch.randn_like, torch.rand_like][a % 2](r[-1])
    return r[-1] + 0.1 * made


def unused_noise(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    torch.rand(1 + a % 3, device=r[-1].device)
    return r[-1] + 0.0


def residual(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    return r[-1] + r[a % len(r)]


def gate(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    return r[-1] * r[a % len(r)].sigmoid()


def in_place(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    out = r[-1] * 1.25
    if a % 3 == 0:
        return out.add_(r[b % len(r)].detach(), alpha=0.5)
    if a % 3 == 1:
        return out.mul_(0.5).sub_(0.1)
    return out.clamp_(-1.0, 1.0 + b)


def in_place_view(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    out = r[-1] + 0.5
    width = 1 + a % WIDTH
    if b % 3 == 0:
        out[:, :width].mul_(1.5)
    elif b % 3 == 1:
        out.t()[width - 1] = 0.25
    else:
        out.view(-1, 2, WIDTH // 2)[:, 1].add_(net.gain[: WIDTH // 2])
    return out


def view(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    h = r[-1]
    forms: list[Callable[[], Tensor]] = [
        lambda: h.t().contiguous().t(),
        lambda: torch.cat([h[:, 3:], h[:, :3]], dim=1),
        lambda: torch.cat(h.chunk(2, dim=1)[::-1], dim=1),
        lambda: h.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
        lambda: h.flip(1),
        lambda: h.unfold(1, 2, 2).flatten(1),
        lambda: h.roll(a, 1),
        lambda: torch.stack(h.unbind(1), dim=1),
        lambda: h[:, torch.arange(WIDTH - 1, -1, -1, device=h.device)],
        lambda: h.expand(2, *h.shape).mean(dim=0),
    ]
    return forms[b % len(forms)]()


def reduce(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    h = r[-1]
    forms: list[Callable[[], Tensor]] = [
        lambda: h - h.mean(dim=a % 2, keepdim=True),
        lambda: h / (h.norm(dim=1, keepdim=True) + 1),
        lambda: h.softmax(dim=1) * WIDTH,
        lambda: h.sort(dim=1).values,
        lambda: h - h.logsumexp(dim=1, keepdim=True),
        lambda: h * (h > h.mean()),
        lambda: torch.where(h > 0, h, 0.1 * h.detach()),
        lambda: h.masked_fill(h.abs() > 2, 0.0),
    ]
    return forms[b % len(forms)]()


def product(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    other = r[a % len(r)]
    return torch.einsum("ri,rj,rj->ri", r[-1], other.tanh(), other.tanh()) / WIDTH


def update_state(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    state = net.state(a)
    with torch.no_grad():
        if b % 2:
            state.lerp_(r[-1].mean(dim=0).tanh(), 0.1)
        else:
            state.mul_(0.9).add_(0.01)
    return r[-1] + state.clone()


def read_state(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    return r[-1] * (1 + net.state(a).clone())


def detached(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    return r[-1] + r[a % len(r)].detach().cos()


def constant(net: RandomNet, r: list[Tensor], a: int, b: int) -> Tensor:
    made = torch.arange(WIDTH, device=r[-1].device) / WIDTH
    made += a % 3
    return r[-1] + made


OPERATIONS: dict[str, Callable[[RandomNet, list[Tensor], int, int], Tensor]] = {
    operation.__name__: operation
    for operation in (
        *(linear, activation, norm, dropout, noise, unused_noise, residual, gate, in_place),
        *(in_place_view, view, reduce, product, update_state, read_state, detached, constant),
    )
}
instructions = st.tuples(st.sampled_from(list(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))
programs = st.lists(instructions, min_size=1, max_size=8)


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    program=programs,
    optimizer=st.sampled_from(["fused_adam", "adamw", "sgd"]),
    microbatches=st.sampled_from([1, 1, 2, 3]),
    max_grad_norm=st.sampled_from([None, 0.1]),
    scope=st.sampled_from(["full_iteration", "full_iteration", "forward_backward"]),
)
def test_random_networks_replay_as_eager_runs(
    device: torch.device,
    program: list[Instruction],
    optimizer: str,
    microbatches: int,
    max_grad_norm: float | None,
    scope: str,
) -> None:
    case = Case(lambda: RandomNet(program), features(WIDTH))
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": max_grad_norm}
    expected = run(case, "none", device, optimizer=optimizer, **options)
    got = run(case, scope, device, optimizer=optimizer, **options)
    assert_same_run(expected, got)
    assert got.report.num_captures == 1
    assert got.num_forwards[-1] == 4 * microbatches


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_form_of_an_operation_replays_as_eager_runs(name: str, device: torch.device) -> None:
    program = []
    for number in range(10):
        program += [(name, number, number), ("linear", number, 0)]
    case = Case(lambda: RandomNet(program), features(WIDTH))
    expected = run(case, "none", device, num_steps=7)
    assert_same_run(expected, run(case, "full_iteration", device, num_steps=7))
