"""Numbers of groups: live where an optimizer fills them into tensors, else guarded.

Such an optimizer counts in Python.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp.errors import CaptureError, GuardError
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, Trace, assert_same_run, run

Rate = Callable[[dict[str, Any], Any], Any]  # of a group and a step count
CPU = torch.device("cpu")


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


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    for _ in range(2):
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
    return loss.detach()


def trained(
    device: torch.device,
    rate: Rate = corrected,
    *,
    function: Callable[..., None] = update,
    scopes: Iterable[str] = ("none", "full_iteration"),
    **options: Any,
) -> list[Trace]:
    """Train in each scope, with groups whose numbers and counts are others in each call."""
    steps_of_call = 2 if "iteration" in options else 1

    def make(params: list[nn.Parameter]) -> Counting:
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
        return Counting(groups, rate, update=function)

    def start(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        calls = itertools.count(1)

        def after_call() -> None:
            counts = [state["step"] for state in optimizer.state.values()]
            assert counts == [steps_of_call * next(calls)] * 4
            for group in optimizer.param_groups:
                group["lr"] *= 0.8
                group["betas"] = (0.9, group["betas"][1] - 0.01)

        return after_call

    case = Case(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
        lambda generator: Batch((torch.randn(5, 4, generator=generator),)),
        None if "iteration" in options else mean_square,
        start,
    )
    return [run(case, scope, device, optimizer=make, **options) for scope in scopes]


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
    assert_same_run(*trained(device, rate, **options))


def add_by_number(param: Tensor, grad: Tensor, mean: Tensor, lr: Tensor, *others: Any) -> None:
    param.add_(grad, alpha=-lr)  # type: ignore[arg-type] # a read in eager mode


def test_a_0d_tensor_as_a_factor_is_not_read() -> None:
    assert_same_run(*trained(CPU, function=add_by_number))


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
        trained(CPU, rate, scopes=["full_iteration"])


def test_a_live_number_that_an_operator_would_hold_is_refused() -> None:
    class Holding(Counting):
        def step(self) -> None:  # type: ignore[override]
            super().step()
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.add_(param.grad, alpha=-self.param_groups[0]["lr"])

    model = nn.Linear(4, 1)
    optimizer = Holding(model.parameters(), plain, update=hold_rate)
    step = graphfsdp.capture(model, optimizer, loss_fn=mean_square)
    with pytest.raises(CaptureError, match=r"gives a number to an operator .*fill_\(\)"):
        repeat(step)


def test_check_knows_counts_that_stay_live() -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    live, held = (
        graphfsdp.check(
            model,
            Counting(model.parameters(), rate, update=update),
            x,
            loss_fn=mean_square,
            target="cpu",
        )
        for rate in (corrected, rooted)
    )
    assert not live.hazards
    assert "takes a number out" in str(held)


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
            return mean_square(model, x)

        step = graphfsdp.capture(model, optimizer, loss_fn=calls_it)
        with pytest.raises(CaptureError, match=r"compiled by torch\.compile"):
            repeat(step)
    else:
        (expected,) = trained(CPU, scopes=["none"])
        scopes = ("none", "forward_backward", "full_iteration")
        for got in trained(CPU, function=compiled, scopes=scopes):
            assert_same_run(expected, got)
    assert not calls
    compiled(*given)
    assert calls


adamw = partial(torch.optim.AdamW, fused=True)
CHANGES: list[Callable[[dict[str, Any]], object]] = [
    lambda group: group.update(lr=torch.tensor(0.5)),
    lambda group: group.update(lr=0.5),
    lambda group: setattr(group["lr"], "data", torch.tensor(0.1)),
]


@pytest.mark.parametrize(
    ("make", "lr", "change", "words"),
    [
        (
            torch.optim.SGD,
            0.1,
            lambda group: group.pop("momentum"),
            r"'momentum' of group 0 .* now missing",
        ),
        *(
            (make, torch.tensor(0.1), change, "group 0")
            for make in (adamw, FusedAdam)
            for change in CHANGES
        ),
    ],
)
def test_what_a_graph_cannot_follow_is_refused(
    make: Any, lr: Any, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters(), lr=lr.clone() if isinstance(lr, Tensor) else lr)
    with graphfsdp.capture(model, optimizer, loss_fn=mean_square) as step:
        for _ in range(5):
            step(torch.ones(2, 4))
        if isinstance(lr, Tensor):
            optimizer.param_groups[0]["lr"].fill_(0.5)  # which the graph reads
            step(torch.ones(2, 4))
        change(optimizer.param_groups[0])
        with pytest.raises(GuardError, match=words):
            step(torch.ones(2, 4))
