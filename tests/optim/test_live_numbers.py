"""Optimizers that count in Python and fill numbers into tensors: captured with live numbers."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp.errors import CaptureError, GuardError

Rate = Callable[[dict[str, Any], Any], Any]  # of a group and a step count
STEPS = 8


def plain(group: dict[str, Any], step: Any) -> Any:
    return group["lr"]


def corrected(group: dict[str, Any], step: Any) -> Any:
    return group["lr"] * max(1.0, 8 / 2) ** 0.5 / (1 - group["betas"][0] ** step) ** 0.5


def warmed_up(group: dict[str, Any], step: Any) -> Any:
    return group["lr"] * (step / 6 if step < 6 else 1.0)


def rooted(group: dict[str, Any], step: Any) -> Any:
    return group["lr"] * math.sqrt(1 - group["betas"][0] ** step)


def taken_out(group: dict[str, Any], step: Any) -> Any:
    return float(group["lr"])


class Counting(torch.optim.Optimizer):
    """As nanochat's: counts in its state, hands numbers to a function as 0-D tensors."""

    def __init__(self, params: Any, rate: Rate, *, update: Callable[..., None]) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.95), "kind": 1})
        self._rate = rate
        self._update = update
        self._lr = torch.tensor(0.0)
        self._others = {"decay": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(param))
                state["step"] += 1
                self._lr.fill_(self._rate(group, state["step"]))
                self._others["decay"].fill_(group["betas"][1])
                others = (self._lr, self._others["decay"])
                self._update(param, param.grad, state["mean"], *others, group["kind"])


def update(param: Tensor, grad: Tensor, mean: Tensor, lr: Tensor, decay: Tensor, kind: int) -> None:
    mean.lerp_(grad, 1 - decay)
    param.sub_(lr * mean * (1, 0.5)[kind])


def hold_rate(param: Tensor, grad: Tensor, *others: Any) -> None:
    param.sub_(grad * 0.01)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model, x)
        loss.backward()
        optimizer.step()
    return loss.detach()


def train(
    device: torch.device,
    scope: str,
    rate: Rate = corrected,
    *,
    function: Callable[..., None] = update,
    **options: Any,
) -> tuple[list[Tensor], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
    optimizer = Counting(groups, rate, update=function)
    if "iteration" not in options:
        options["loss_fn"] = loss_fn
    results = []
    with graphfsdp.capture(model, optimizer, scope=scope, **options) as step:
        for index in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
                group["betas"] = (0.9, 0.95 - index * 0.01)
            results.append(step(torch.randn(5, 4, device=device)))
    counts = [state["step"] for state in optimizer.state.values()]
    return [*results, *(param.detach() for param in model.parameters())], counts


def repeat(step: Callable[[Tensor], Any]) -> None:
    for _ in range(4):
        step(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("rate", "options"),
    [
        (plain, {}),
        (corrected, {"verify": 2}),
        (corrected, {"iteration": twice}),
        (warmed_up, {"on_change": "recapture"}),
    ],
    ids=["plain", "verified", "twice", "decides"],
)
def test_what_is_filled_in_follows_counts_and_groups(
    device: torch.device, rate: Rate, options: dict[str, Any]
) -> None:
    expected, counts = train(device, "none", rate, **options)
    got, replayed = train(device, "full_iteration", rate, **options)
    assert counts == replayed == [STEPS * (2 if "iteration" in options else 1)] * 4
    assert all(map(torch.equal, expected, got))


def add_by_number(param: Tensor, grad: Tensor, mean: Tensor, lr: Tensor, *others: Any) -> None:
    param.add_(grad, alpha=-lr)  # type: ignore[arg-type] # a read in eager mode


def test_a_0d_tensor_as_a_factor_is_not_read() -> None:
    device = torch.device("cpu")
    expected, _ = train(device, "none", function=add_by_number)
    got, _ = train(device, "full_iteration", function=add_by_number)
    assert all(map(torch.equal, expected, got))


@pytest.mark.parametrize(
    ("rate", "error", "words"),
    [
        (rooted, CaptureError, r"takes a number out of what it counts.* fill_\(\)"),
        (taken_out, GuardError, r"a number that .*Counting\.step has computed.* fill_\(\)"),
        (warmed_up, GuardError, "was True when the iteration was captured, and is now False"),
    ],
)
def test_numbers_that_a_replay_would_hold_are_refused(
    rate: Rate, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        train(torch.device("cpu"), "full_iteration", rate)


def test_a_live_number_that_an_operator_would_hold_is_refused() -> None:
    class Holding(Counting):
        def step(self) -> None:  # type: ignore[override]
            super().step()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.add_(param.grad, alpha=-self.param_groups[0]["lr"])

    model = nn.Linear(4, 1)
    optimizer = Holding(model.parameters(), plain, update=hold_rate)
    step = graphfsdp.capture(model, optimizer, loss_fn=loss_fn)
    with pytest.raises(CaptureError, match=r"gives a number to an operator .*fill_\(\)"):
        repeat(step)


def test_check_knows_counts_that_stay_live() -> None:
    model = nn.Linear(4, 1)
    optimizer = Counting(model.parameters(), corrected, update=update)
    report = graphfsdp.check(model, optimizer, torch.ones(2, 4), loss_fn=loss_fn, target="cpu")
    assert not report.hazards
    optimizer = Counting(model.parameters(), rooted, update=update)
    report = graphfsdp.check(model, optimizer, torch.ones(2, 4), loss_fn=loss_fn, target="cpu")
    assert "takes a number out" in str(report)


@pytest.mark.parametrize("is_refused", [False, True])
def test_compiled_steps_run_as_written_on_a_cpu_and_compile_as_ever_afterwards(
    is_refused: bool,
) -> None:
    """Also behind a capture that has refused what is compiled."""
    calls: list[int] = []

    def backend(module: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        calls.append(1)
        return module.forward

    compiled: Any = torch.compile(update, backend=backend, fullgraph=True, dynamic=False)
    ones = (torch.ones(4), torch.ones(4), torch.ones(4))
    given = (*ones, torch.tensor(0.1), torch.tensor(0.9), 1)
    if is_refused:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def calls_it(model: nn.Module, x: Tensor) -> Tensor:
            compiled(*given)
            return loss_fn(model, x)

        step = graphfsdp.capture(model, optimizer, loss_fn=calls_it)
        with pytest.raises(CaptureError, match=r"compiled by torch\.compile"):
            repeat(step)
    else:
        device = torch.device("cpu")
        expected, _ = train(device, "none")
        for scope in ("none", "forward_backward", "full_iteration"):
            got, _ = train(device, scope, function=compiled)
            assert all(map(torch.equal, expected, got))
    assert not calls
    compiled(*given)
    assert calls
