"""Every known way in which a captured training step goes wrong, and its exact diagnosis.

Programs come from refused_programs.py; beside them are those that are wrong in their settings.
Each is judged twice: by ``capture``, which raises and leaves nothing behind, and by
``graphfsdp.check``, which lists. Below is what is refused, or undone, in places of its own; and
Python values that a capture would freeze, which differ between warm-up and capture.
"""

import functools
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphfsdp
import refused_programs
from counting_net import mean_square
from graphfsdp import CaptureError, HazardKind, Phase
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_state, run_as_eager, snapshot
from iterations import steps_once
from mid_forward import (
    Inner,
    Probe,
    assert_refused_in,
    batches,
    check_captured,
    check_refused,
    make_probe,
    refusal_of,
)
from refused_programs import REFUSED, SCALAR, Refused
from zoo import features

CPU = torch.device("cpu")
CAPTURED = [name for name, case in REFUSED.items() if case.by != "check"]
# What both refuse, one watcher finds for both: `check` judges the first of each
# kind and reason.
FIRST = {(case.kind, case.why, case.target): name for name, case in reversed(REFUSED.items())}
CHECKED = [
    name
    for name, case in REFUSED.items()
    if case.by == "check" or (case.by == "both" and name in FIRST.values())
]
sparse_warns = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


@sparse_warns
@pytest.mark.parametrize("name", CAPTURED)
def test_capture_refuses_by_name_and_rolls_back(name: str, device: torch.device) -> None:
    case = REFUSED[name]
    if case.cpu_only and device.type != "cpu":
        pytest.skip("this program is legal on CUDA, or fails before it reaches a capture")
    if case.keeps_state:
        error = refusal_of(*make_probe(case.program, device), device)
    else:
        error = check_refused(case.program, device)
    assert_diagnosed(case, error.hazard)
    assert "Remedy: " in str(error)
    if case.op is not None and case.target == "cpu":
        assert error.module_path == case.module
        assert error.source is not None
        assert case.function in error.source.function
        assert f"{error.source.file}:{error.source.line} in {error.source.function}" in str(error)
        assert str(case.module or "") in str(error)


@sparse_warns
@pytest.mark.parametrize("name", CHECKED)
def test_check_lists_what_is_refused_and_changes_nothing(name: str) -> None:
    case = REFUSED[name]
    torch.manual_seed(11)
    model = Probe(case.program)
    optim = FusedAdam(model.parameters(), lr=0.01)
    before = snapshot(model, optim)
    report = graphfsdp.check(model, optim, batches(CPU, 1)[0], target=case.target)
    assert_same_state(before, snapshot(model, optim), "after the check")
    hazards = [
        hazard
        for hazard in report.hazards
        if hazard.kind is case.kind and re.fullmatch(case.op or ".*", hazard.op or "")
    ]
    assert hazards, str(report)
    assert_diagnosed(case, hazards[0])
    if case.target == "cpu":
        assert hazards[0].module_path == case.module
        if case.kind in (HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE):
            assert hazards[0].cuda_error == 900


def assert_diagnosed(case: Refused, hazard: graphfsdp.Hazard) -> None:
    assert hazard.kind is case.kind
    assert case.op is None or re.fullmatch(case.op, hazard.op or ""), hazard.op
    assert case.why in hazard.why
    assert hazard.fix
    assert case.fix in hazard.fix
    if case.has_line:
        assert hazard.source is not None
        assert hazard.source.file == refused_programs.__file__
        assert hazard.source.line == case.line


Made = dict[str, Any]


def made(**changed: Any) -> Made:
    """Return arguments of a good step, some of them changed."""
    model = changed.pop("model", None) or nn.Linear(4, 4)
    optimizer = changed.pop("optimizer", None) or FusedAdam(model.parameters())
    return {"model": model, "optimizer": optimizer, "loss_fn": mean_square, **changed}


def with_optimizer(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]) -> Made:
    model = nn.Linear(4, 4)
    return made(model=model, optimizer=make(model.parameters()))


class _Counting(torch.optim.SGD):
    num_steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps = self.num_steps + 1


def frozen() -> Made:
    model = nn.Linear(4, 4)
    return made(model=model.requires_grad_(False), optimizer=FusedAdam(model.parameters()))


def half_on_meta() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    return made(model=model, optimizer=FusedAdam(model[0].parameters()))


def unused() -> Made:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return made(model=model, loss_fn=lambda model, x: model[0](x).mean())


CONFIG, LOSS, OPTIMIZER = HazardKind.CONFIG, HazardKind.LOSS, HazardKind.OPTIMIZER
# name: (arguments, kind, part of what check says, error of capture or None)
Setting = tuple[Callable[[], Made], HazardKind, str, type[Exception] | None]
SETTINGS: dict[str, Setting] = {
    "lbfgs": (
        lambda: with_optimizer(torch.optim.LBFGS),
        *(OPTIMIZER, "as often as it likes", graphfsdp.ConfigError),
    ),
    "adafactor_of_torch": (
        lambda: with_optimizer(torch.optim.Adafactor),
        *(HazardKind.HOST_READ, "reads a value of the iteration on", graphfsdp.CaptureError),
    ),
    "optimizer_that_counts": (
        lambda: with_optimizer(lambda params: _Counting(params, lr=0.1)),
        *(OPTIMIZER, "changed the number 'num_steps'", graphfsdp.CaptureError),
    ),
    "precision_clash": (
        lambda: made(mp_policy=graphfsdp.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)),
        *(HazardKind.PRECISION, "bfloat16", graphfsdp.PrecisionError),
    ),
    "nothing_to_train": (frozen, CONFIG, "there is nothing to train", graphfsdp.ConfigError),
    "two_devices": (
        half_on_meta,
        *(CONFIG, "the model has '0.weight' on cpu, '1.weight' on meta", graphfsdp.ConfigError),
    ),
    "odd_microbatches": (
        lambda: made(microbatches=3),
        *(CONFIG, "cannot be split on dim 0 into 3", graphfsdp.ConfigError),
    ),
    "parameter_without_gradient": (
        unused,
        *(HazardKind.GRADIENT, "'1.weight', '1.bias': no gradient", None),
    ),
    "broken_loss_function": (
        lambda: made(loss_fn=lambda model, x: model(x[0, 0, 0])),
        *(HazardKind.EXCEPTION, "raises IndexError", IndexError),
    ),
}
LOSSES: list[tuple[Callable[..., Any], str]] = [
    (lambda model, x: 1.0, "the loss is a float"),
    (lambda model, x: None, "the loss is a NoneType"),
    (lambda model, x: (), "the loss is a tuple"),
    (lambda model, x: {"loss": model(x)}, "the loss is a dict"),
    (lambda model, x: model(x), "a tensor of shape (8, 4)"),
    (lambda model, x: model(x).detach().mean(), "no trainable parameter contributed"),
    (lambda model, x: (model(x).mean(), 3), "returned a int beside the loss"),
    (lambda model, x: (model(x).mean(), {"name": "x"}), "returned a str beside the loss"),
]
SETTINGS |= {
    said: (partial(made, loss_fn=loss_fn), LOSS, said, graphfsdp.InvalidLossError)
    for loss_fn, said in LOSSES
}


@pytest.mark.parametrize("name", SETTINGS)
def test_check_lists_wrong_settings(name: str) -> None:
    make, kind, said, _ = SETTINGS[name]
    arguments = make()
    report = graphfsdp.check(
        arguments.pop("model"), arguments.pop("optimizer"), torch.randn(8, 4), **arguments
    )
    (hazard,) = [hazard for hazard in report.hazards if hazard.kind is kind]
    assert said in hazard.why
    assert hazard.fix
    if kind in (HazardKind.LOSS, HazardKind.EXCEPTION):
        assert hazard.source is not None
        assert hazard.source.file == __file__


@pytest.mark.parametrize("name", [n for n, (*_, error) in SETTINGS.items() if error is not None])
def test_capture_refuses_wrong_settings_and_leaves_no_trace(name: str) -> None:
    make, kind, said, error = SETTINGS[name]
    assert error is not None
    arguments, before = make(), None
    with pytest.raises(error) as caught:  # noqa: PT012
        step = graphfsdp.capture(**arguments, warmup_steps=1)
        for x in torch.randn(3, 8, 4):
            before = snapshot(arguments["model"], arguments["optimizer"])
            step(x)
    if before is not None:
        assert_same_state(before, snapshot(arguments["model"], arguments["optimizer"]))
    if kind is not HazardKind.EXCEPTION:
        assert said in str(caught.value)
        assert kind is HazardKind.PRECISION or "Remedy: " in str(caught.value)
    if isinstance(caught.value, graphfsdp.CaptureError):
        assert caught.value.kind is kind


@pytest.mark.parametrize("name", ["item", "boolean_mask", "get_rng_state"])
@pytest.mark.parametrize(
    "options", [{"microbatches": 2}, {"max_grad_norm": 0.1}, {"scope": "forward_backward"}], ids=str
)
def test_refused_whatever_the_options(
    name: str, options: dict[str, object], device: torch.device
) -> None:
    if "max_grad_norm" in options:
        refusal_of(*make_probe(REFUSED[name].program, device, **options), device)
        return
    check_refused(REFUSED[name].program, device, **options)


def test_a_read_in_the_loss_function_is_refused_outside_any_module(device: torch.device) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.detach().item()  # refused

    error = refusal_of(*make_probe(lambda self, h, x: h, device, loss_fn=loss_fn), device)
    assert error.module_path is None
    assert_refused_in(error, loss_fn)


def test_a_read_in_the_optimizer_is_refused_after_parameters_were_written(
    device: torch.device,
) -> None:
    class Careless(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            float(self.param_groups[0]["params"][0].sum())  # refused

    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(device)
    optim = Careless(model.parameters(), lr=0.1, momentum=0.9)
    step = graphfsdp.capture(model, optim, loss_fn=lambda model, x: model(x).mean())
    assert_refused_in(refusal_of(step, model, optim, device), Careless.step)


@pytest.mark.parametrize("is_own", [False, True], ids=["default", "own iteration"])
def test_a_read_in_an_optimizer_of_torch_comes_with_the_remedies_for_optimizers(
    is_own: bool,
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adafactor(model.parameters())
    iteration = steps_once() if is_own else None
    step = graphfsdp.capture(model, optimizer, loss_fn=mean_square, iteration=iteration)
    error = refusal_of(step, model, optimizer, CPU)
    assert re.match(r"Adafactor\.step: .*'forward_backward'", str(error))


def test_a_read_in_a_module_of_torch_is_refused_at_its_callers_line(device: torch.device) -> None:
    """Without momentum, batch norm divides by a count that it reads on the host."""

    class Cumulative(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)  # refused
            return x.square().mean()

    model = Cumulative([nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)]).to(device)
    optim = FusedAdam(model.parameters(), lr=0.1)
    step = graphfsdp.capture(model, optim)
    error = refusal_of(step, model, optim, device)
    assert error.op == SCALAR
    assert error.module_path == "1"
    assert "BatchNorm1d(momentum=None)" in str(error)
    assert "the default 0.1" in error.hazard.fix
    assert_refused_in(error, Cumulative.forward)


def is_seen(mask: Tensor) -> bool:
    return bool(mask.all())


def selects(mask: Tensor) -> Tensor:
    return mask[mask].sum()


@pytest.mark.parametrize(
    ("name", "function", "remedy"),
    [
        ("ema_pytorch.ema_pytorch", is_seen, "ema.update() after each call"),
        ("torch_geometric.utils.loop", selects, "layers with add_self_loops=False"),
    ],
)
def test_what_libraries_are_known_for_is_refused_with_its_remedy(
    name: str, function: types.FunctionType, remedy: str, device: torch.device
) -> None:
    library = types.FunctionType(function.__code__, globals() | {"__name__": name})

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        out: Tensor = h * library(x > 0)
        return out

    assert remedy in str(check_refused(program, device))


def test_masks_of_transformers_are_made_without_a_look(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "transformers.masking_utils"
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    library = types.FunctionType(is_seen.__code__, globals() | {"__name__": name})

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        made = torch.ones(4, device=x.device)
        answers = [library(x == x), library(made[1:])]  # of which one is made of numbers alone
        made[0] = x[0, 0]
        assert [*answers, library(made[1:])] == [False, True, False]
        return h * self.gate

    check_captured(program, device)


def test_a_tensor_that_vmap_has_left_in_python_is_nobodys_business(device: torch.device) -> None:
    left: dict[str, Any] = {}

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        def row(h: Tensor) -> Tensor:
            left["last"] = self.last = h * 2
            return h * self.gate

        out: Tensor = torch.vmap(row)(h)
        return out

    step, *_ = make_probe(program, device)
    for x in batches(device, 6):
        step(x)
    assert step.phase is graphfsdp.Phase.REPLAY


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning")
def test_compiled_functions_and_modules_are_refused_on_a_cpu() -> None:
    function = torch.compile(lambda h: h * 2, backend="eager")
    layer = torch.compile(nn.Linear(4, 4), backend="eager")
    for compiled in (function, layer):

        def program(self: Inner, h: Tensor, x: Tensor, compiled: Any = compiled) -> Tensor:
            out: Tensor = compiled(h)  # refused
            return out

        error = check_refused(program, CPU)
        assert error.op == "torch.compile"
        assert "compiled by torch.compile" in str(error)
        assert_refused_in(error, program)


def test_what_was_drawn_from_a_generator_of_a_closure_is_undone() -> None:
    generator = torch.Generator()

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        return h * torch.rand(4, generator=generator) * h.sum().item()

    step, *_ = make_probe(program, CPU, warmup_steps=1)
    step(batches(CPU, 1)[0])
    before = generator.get_state()
    with pytest.raises(graphfsdp.CaptureError):
        step(batches(CPU, 1)[0])
    assert torch.equal(generator.get_state(), before)


def test_numpy_cannot_write_a_constant_behind_the_recording() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        shift = torch.zeros(4)
        if writes:
            shift.numpy()[:] = 3.0
        return h * float(np.sqrt(torch.full((4,), 2.0).numpy()).sum()) + shift

    writes = False
    check_captured(program, CPU)
    step, *_ = make_probe(program, CPU)
    for x in batches(CPU, 3):
        step(x)
    writes = True
    with pytest.raises(ValueError, match="read-only"):
        step(batches(CPU, 1)[0])


Number = Callable[[], float]


class Scaled(nn.Module):
    """Multiplies by what Python says, in one of several ways."""

    def __init__(self, number: Number, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.number = number
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        number = self.number()
        h = self.linear(x)
        if self.way == "argument":
            h = h * number
        elif self.way == "literal":
            h = h * torch.tensor([number] * 9)[0]
        elif self.way == "path":
            h = h.relu() if number % 2 else h.tanh()
        elif self.way == "no_grad":
            with torch.no_grad():
                x = x + number
            h = self.linear(x)
        elif self.way == "backward":
            h.register_hook(lambda grad: grad * number)
        loss: Tensor = h.square().mean()
        return loss


def make_step(
    model: nn.Module, device: torch.device, warmup_steps: int = 3
) -> graphfsdp.CapturedStep:
    optimizer = FusedAdam(model.to(device).parameters(), lr=0.01)
    return graphfsdp.capture(model, optimizer, warmup_steps=warmup_steps)


KINDS = {
    "argument": (HazardKind.BAKED_NUMBER, "was given .*Remedy"),
    "literal": (HazardKind.BAKED_NUMBER, "was given 9 numbers.*Remedy"),
    "no_grad": (HazardKind.BAKED_NUMBER, "was given .*Remedy"),
    "backward": (HazardKind.BAKED_NUMBER, "was given .*Remedy"),
    "path": (HazardKind.CONTROL_FLOW, "the iteration ran .*Remedy"),
}


@pytest.mark.parametrize("way", KINDS)
def test_a_counter_is_refused_with_its_line_and_undone(way: str, device: torch.device) -> None:
    """Each time anew, behind one more warm-up."""
    kind, words = KINDS[way]
    counter = itertools.count(1)
    model = Scaled(lambda: float(next(counter)), way)
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for index in range(5 if way == "path" else 9):  # two paths come back
        is_refused = index in (4, 7)  # the fourth is done again, in case it was only this once
        before = snapshot(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(CaptureError, match=words) if is_refused else nullcontext() as caught:
            step(x)
        assert (step.phase, caught is not None) == (Phase.WARMUP, is_refused)
        if caught is not None:
            assert_same_state(before, snapshot(model, torch.optim.SGD(model.parameters())))
            assert caught.value.kind is kind
            assert caught.value.source is not None
            assert caught.value.source.file == __file__


def test_what_changes_once_costs_one_more_warm_up(device: torch.device) -> None:
    held = {"number": 1.0}

    def setup(model: nn.Module, optimizer: object) -> Callable[[], object]:
        held["number"] = 1.0
        later = iter([1.0] * 2 + [5.0] * 20)
        return lambda: held.update(number=next(later))

    number = functools.partial(held.__getitem__, "number")
    case = Case(lambda: Scaled(number, "argument"), features(4), setup=setup)
    report = run_as_eager(case, device).report
    assert report.num_calls == {"warmup": 4, "capture": 1, "replay": 9}


class Positions(nn.Module):
    """Makes a cache for each length, with operators that the model calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.caches: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        length = len(x)
        if length not in self.caches:
            self.caches[length] = torch.arange(length, device=x.device).unsqueeze(1)
        places = torch.arange(4 * length, device=x.device).view(length, 4)
        loss: Tensor = (self.linear(x + places) * self.caches[length]).square().mean()
        return loss


def test_operators_that_only_the_first_run_calls_shift_nothing(device: torch.device) -> None:
    x = torch.randn(8, 4, device=device)
    step = make_step(Positions(), device, warmup_steps=1)
    phases = [(step(x), step.phase)[1] for _ in range(2)]
    assert phases == [Phase.WARMUP, Phase.REPLAY]
    optimizer = FusedAdam((model := Positions().to(device)).parameters())
    with graphfsdp.capture(
        model, optimizer, example_batch=x, warmup_steps=1, on_change="recapture"
    ) as step:
        for length in (8, 6, 6, 6, 8):
            step(x[:length])
        assert step.report().num_captures == 2


@pytest.mark.parametrize("moves", [True, False])
def test_a_retry_after_another_failure_is_compared_as_well(
    moves: bool, device: torch.device
) -> None:
    """Without what was refused, and where that ran in warm-ups with fewer operators than they."""
    counter = itertools.count(1)
    model = Scaled((lambda: float(next(counter))) if moves else (lambda: 2.0), "argument")
    step = make_step(model, device)
    x = torch.randn(8, 4, device=device)
    for index in range(4):
        if index == (3 if moves else 0):
            hook = model.linear.register_forward_hook(
                lambda module, args, out: float(out.detach().sum()) and out
            )
        with pytest.raises(CaptureError, match="on the host") if index == 3 else nullcontext():
            step(x)
    hook.remove()
    step(x)  # captured; or refused, undone and warmed up once more
    assert step.phase is (Phase.WARMUP if moves else Phase.REPLAY)
    if moves:
        with pytest.raises(CaptureError, match=r"was given 6\.0 .* and 7\.0"):
            step(x)
