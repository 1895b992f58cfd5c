"""Numbers of optimizers that a graph would hold: refused by name, or guarded.

And steps that are compiled, which run as written on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from graphfsdp.errors import CaptureError, ConfigError, GuardError
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_run, run


class Counting(torch.optim.Optimizer):
    """As nanochat's: hands numbers, in 0-D tensors, to a function; counts in Python or in one."""

    def __init__(
        self, params: Any, update: Callable[..., None], start: Callable[[], Any] = lambda: 0
    ) -> None:
        super().__init__(params, {"lr": 0.1})
        self._update = update
        self._start = start

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=self._start(), mean=torch.zeros_like(param))
                state["step"] += 1
                self._update(param, param.grad, state["mean"], 1 / (state["step"] + 1))


def update(param: Tensor, grad: Tensor, mean: Tensor, share: Any) -> None:
    mean.lerp_(grad, 0.5)
    param.sub_(0.1 * share * mean)


def repeat(step: Callable[[Tensor], Any]) -> None:
    for _ in range(4):
        step(torch.ones(2, 4))


def test_a_count_in_python_is_refused_by_name() -> None:
    model = nn.Linear(4, 1)
    made = Counting(model.parameters(), update)
    report = graphfsdp.check(model, made, torch.ones(2, 4), loss_fn=mean_square, target="cpu")
    assert "changed the number 'step'" in str(report)
    step = graphfsdp.capture(model, made, loss_fn=mean_square)
    with pytest.raises(CaptureError, match=r"changed the number 'step' .*counting in a tensor"):
        repeat(step)


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
    given = (torch.ones(4), torch.ones(4), torch.ones(4), torch.tensor(0.1))
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
        case = Case(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)),
            lambda generator: Batch((torch.randn(5, 4, generator=generator),)),
            mean_square,
            lambda *_: lambda: None,  # its lr stays
        )
        zero = partial(torch.tensor, 0.0)
        cpu = torch.device("cpu")
        expected = run(case, "none", cpu, optimizer=partial(Counting, update=update, start=zero))
        for scope in ("none", "forward_backward", "full_iteration"):
            made = partial(Counting, update=compiled, start=zero)
            assert_same_run(expected, run(case, scope, cpu, optimizer=made))
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
        (FusedAdam, 0.1, CHANGES[0], "lr of parameter group 0 must be a finite number"),
        *((adamw, torch.tensor(0.1), change, "group 0") for change in CHANGES),
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
        with pytest.raises((GuardError, ConfigError), match=words):
            step(torch.ones(2, 4))
