"""Optimizers of torch as users make them: captured without a flag, with an lr that stays live.

Numbers that a graph would hold are refused by name, or guarded; steps that are compiled run as
written on a CPU.
"""

import copy
import itertools
import operator
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import graphfsdp
from counting_net import mean_square
from graphfsdp.errors import CaptureError, ConfigError, GuardError
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_run, run
from iterations import steps_once

Make = Callable[..., torch.optim.Optimizer]
OPTIM = torch.optim

MAKERS: dict[str, Make] = {
    "Adam": OPTIM.Adam,
    "Adam, amsgrad": lambda params, lr: OPTIM.Adam(params, lr, amsgrad=True, weight_decay=0.1),
    "AdamW": OPTIM.AdamW,
    "AdamW, fused": lambda params, lr: OPTIM.AdamW(params, lr, fused=True),
    "AdamW, not fused": lambda params, lr: OPTIM.AdamW(params, lr, fused=False),
    "Adam, lr a tensor": lambda params, lr: with_tensor(OPTIM.Adam, params, lr),
    "AdamW, lr a tensor": lambda params, lr: with_tensor(OPTIM.AdamW, params, lr),
    "SGD, lr a tensor": lambda params, lr: with_tensor(OPTIM.SGD, params, lr),
    "Adam, betas tensors": lambda params, lr: OPTIM.Adam(
        params, lr, betas=(torch.tensor(0.8), torch.tensor(0.95))
    ),
    "AdamW, foreach": lambda params, lr: OPTIM.AdamW(params, lr, foreach=True),
    "SGD": OPTIM.SGD,
    "SGD, nesterov": lambda params, lr: OPTIM.SGD(
        params, lr, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "SGD, fused": lambda params, lr: OPTIM.SGD(params, lr, momentum=0.9, fused=True),
    "SGD, foreach": lambda params, lr: OPTIM.SGD(params, lr, momentum=0.9, foreach=True),
    "FusedAdam": FusedAdam,
    "Adadelta": lambda params, lr: OPTIM.Adadelta(params, 10 * lr, weight_decay=0.1),
    "Adagrad": lambda params, lr: OPTIM.Adagrad(params, lr, lr_decay=0.1),
    "Adagrad, not fused": lambda params, lr: OPTIM.Adagrad(params, lr, fused=False),
    "Adamax": OPTIM.Adamax,
    "NAdam": lambda params, lr: OPTIM.NAdam(params, lr, weight_decay=0.1),
    "NAdam, foreach": lambda params, lr: OPTIM.NAdam(params, lr, foreach=True),
    "RAdam": lambda params, lr: OPTIM.RAdam(params, lr, betas=(0.9, 0.95)),
    "RMSprop": OPTIM.RMSprop,
    "RMSprop, centered": lambda params, lr: OPTIM.RMSprop(
        params, lr, momentum=0.9, centered=True, weight_decay=0.1
    ),
    "ASGD": lambda params, lr: OPTIM.ASGD(params, lr, t0=5),
    # Its mask of a parameter without dimensions is read on the host, which is refused.
    "Rprop": lambda params, lr: OPTIM.Rprop([p for p in params if p.dim()], lr),
    "Muon": lambda params, lr: OPTIM.Muon([p for p in params if p.dim() == 2], lr),
}


def with_tensor(kind: Make, params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    params = list(params)
    return kind(params, lr=torch.tensor(lr, device=params[0].device))


# The plain path of the one decides by the step count, that of the other goes through lists, which
# torch does on a CPU with lists of numbers alone. What a graph can hold rounds otherwise, so that
# only graphfsdp's own eager mode has the same bits.
OTHER_BITS = ("RAdam", "NAdam, foreach")
# With parameters of 16 bits these have the plain loop's bits as well.
IN_16_BITS = (
    *("Adam", "Adam, amsgrad", "AdamW", "NAdam", "RMSprop", "SGD", "SGD, nesterov", "Muon"),
    *("Adagrad, not fused", "Adamax", "AdamW, fused", "Adadelta", "SGD, lr a tensor"),
)


class Scale(nn.Module):
    """Has a parameter without dimensions, which takes the dtype of 0-D numbers that it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def net(device: torch.device) -> nn.Module:
    layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Dropout(0.2), nn.Linear(8, 1), Scale())
    return layers.to(device)


Setup = Callable[[nn.Module, torch.optim.Optimizer], Callable[[], object]]


def cosine(model: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], object]:
    return lr_scheduler.CosineAnnealingLR(optim, 20).step


def as_eager(
    name: str,
    device: torch.device,
    *,
    beside: str = "none",
    setup: Setup = cosine,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    """Train a captured loop and another one: the same states; and groups are as they were made."""

    def start(model: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], None]:
        flags = [dict(group) for group in optim.param_groups]
        tick = setup(model, optim)

        def after_call() -> None:
            tick()
            for group, before in zip(optim.param_groups, flags, strict=True):
                for key in before.keys() & {"fused", "foreach", "capturable"}:
                    assert group[key] is before[key], "what was turned on has stayed on"
                assert type(group["lr"]) is type(before["lr"])

        return after_call

    case = Case(
        lambda: net(device).to(dtype),
        lambda generator: Batch((torch.randn(4, 6, generator=generator).to(dtype),)),
        None if "iteration" in options else mean_square,
        start,
    )
    options["optimizer"] = partial(MAKERS[name], lr=0.01)
    expected, got = (run(case, scope, device, **options) for scope in (beside, "full_iteration"))
    assert_same_run(expected, got)
    assert "on_change" in options or got.report.num_calls["replay"] >= 10


@pytest.mark.parametrize("name", MAKERS)
def test_a_captured_loop_has_the_bits_of_the_plain_one(name: str, device: torch.device) -> None:
    if device.type == "cuda" and name == "Adam, betas tensors":
        pytest.skip("on a GPU torch reads such betas on the host, which is refused by name")
    is_same = device.type == "cpu" and name not in OTHER_BITS
    as_eager(name, device, beside="plain" if is_same else "none")


@pytest.mark.parametrize("how", ["as made", "with a hook", "compiled"])
def test_on_a_cpu_a_step_is_an_operator_for_each_group(how: str) -> None:
    """Not where somebody watches the step, and where the compiler fuses all of it."""
    if how == "compiled" and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    groups: Any = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    optimizer = OPTIM.AdamW(groups, lr=0.1)
    if how == "with a hook":
        optimizer.register_step_post_hook(lambda *_: None)
    options: dict[str, Any] = {"compile": True} if how == "compiled" else {}
    with graphfsdp.capture(model, optimizer, loss_fn=mean_square, **options) as step:
        for _ in range(4):
            step(torch.randn(2, 5))
        counts = step.report().op_counts
    assert counts.get("graphfsdp.grouped_step_.default", 0) == (2 if how == "as made" else 0)


@pytest.mark.parametrize("name", IN_16_BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_have_the_bits_of_the_plain_loop(
    dtype: torch.dtype, name: str
) -> None:
    as_eager(name, torch.device("cpu"), beside="plain", dtype=dtype)


def steps_by_a_closure(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor
) -> Tensor | None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        return loss

    loss: Any = optimizer.step(closure)
    return None if loss is None else loss.detach()


@pytest.mark.parametrize(
    ("name", "iteration"),
    [
        *((name, steps_once()) for name in ("AdamW", "SGD")),
        *(
            (name, steps_by_a_closure)
            for name in ("AdamW", "SGD, nesterov", "Adagrad", "NAdam", "Muon", "FusedAdam")
        ),
    ],
)
def test_a_step_inside_an_own_iteration_or_by_a_closure_is_the_same(
    name: str, iteration: Callable[..., Any], device: torch.device
) -> None:
    as_eager(name, device, iteration=iteration)


def loads(at: int) -> Setup:
    """Load, behind a call, a state with another lr, another step count, other moments."""

    def setup(model: nn.Module, optim: torch.optim.Optimizer) -> Callable[[], None]:
        calls = itertools.count()

        def tick() -> None:
            if next(calls) == at:
                state = copy.deepcopy(optim.state_dict())
                for entries in state["state"].values():
                    for value in entries.values():
                        value.mul_(2)
                state["param_groups"][0]["lr"] = 0.1 / at
                optim.load_state_dict(state)

        return tick

    return setup


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_what_torch_loads_makes_another_graph(name: str, device: torch.device) -> None:
    """``graphfsdp.load`` loads into the tensors that a graph reads; torch makes others."""
    with pytest.raises(graphfsdp.GuardError, match=r"now another Tensor(.|\n)*before the capture"):
        as_eager(name, device, setup=loads(5))
    as_eager(name, device, setup=loads(5), on_change="recapture")


def test_a_step_that_was_taken_before_is_refused() -> None:
    """It would not find the lr that is kept live, and go on with that of the capture."""
    model = net(torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_of_before = optimizer.step

    def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = mean_square(model, x)
        loss.backward()
        step_of_before()
        return loss

    with (
        graphfsdp.capture(model, optimizer, iteration=iterate) as step,
        pytest.raises(graphfsdp.ConfigError, match=r"taken from .*AdamW before.*optimizer\.step\("),
    ):
        step(torch.ones(2, 6))


def test_a_list_of_numbers_is_the_tuple_that_a_file_has_made_it_of() -> None:
    """As torch.distributed.checkpoint and JSON do; and what is written into it is seen."""
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    group = optim.param_groups[0]
    with graphfsdp.capture(model, optim, loss_fn=mean_square, warmup_steps=1) as step:
        for index in range(5):
            if index == 3:
                group["betas"] = list(group["betas"])
            step(torch.ones(4, 3))
        assert step.report().num_calls["replay"] == 3
        group["betas"][0] = 0.5
        with pytest.raises(graphfsdp.GuardError, match=r"'betas' .* now \(0\.5, 0\.999\)"):
            step(torch.ones(4, 3))


class Counting(torch.optim.Optimizer):
    """As nanochat's: hands numbers, in 0-D tensors, to a function; counts in Python or in one."""

    def __init__(
        self,
        params: Any,
        update: Callable[..., None],
        start: Callable[[], Any] = lambda: 0,
        add: Callable[[Any, int], Any] = operator.iadd,
    ) -> None:
        super().__init__(params, {"lr": 0.1})
        self._update, self._start, self._add = update, start, add

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(step=self._start(), mean=torch.zeros_like(param))
                state["step"] = self._add(state["step"], 1)
                self._update(param, param.grad, state["mean"], 1 / (state["step"] + 1))


def update(param: Tensor, grad: Tensor, mean: Tensor, share: Any) -> None:
    mean.lerp_(grad, 0.5)
    param.sub_(0.1 * share * mean)


def repeat(step: Callable[[Tensor], Any]) -> None:
    for _ in range(5):
        step(torch.ones(2, 4))


ZERO = partial(torch.tensor, 0.0)


class OnData(Counting):
    """Steps where gradients are recorded, and so is compared with what it did before."""

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            count = self.state[param]["step"] = self.state[param].get("step", 0) + 1
            param.data.sub_(param.grad, alpha=1 / count)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (partial(Counting, update=update), "changed the number 'step'"),
        (
            partial(Counting, update=update, start=ZERO, add=operator.add),
            "a new tensor in the place of its state 'step'",
        ),
        (partial(OnData, update=update), r"OnData\.step: aten\.sub_\.Tensor was given 0\.25 "),
    ],
)
def test_a_count_in_python_is_refused_by_name(made: Callable[..., Counting], said: str) -> None:
    """A tensor that each step makes anew, as transformers' Adafactor does, is one as well."""
    model = nn.Linear(4, 1)
    step = graphfsdp.capture(model, made(model.parameters()), iteration=steps_once())
    with pytest.raises(CaptureError, match=f"(?s){said}.*Remedy: .*scope='for.*step"):
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
        cpu = torch.device("cpu")
        expected = run(case, "none", cpu, optimizer=partial(Counting, update=update, start=ZERO))
        for scope in ("none", "forward_backward", "full_iteration"):
            made = partial(Counting, update=compiled, start=ZERO)
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
