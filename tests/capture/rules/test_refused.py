"""Every known way in which a captured training step goes wrong, and its exact diagnosis.

Programs come from refused_programs.py; below are those that are wrong in their settings.
Each is judged twice: by ``capture``, which raises and leaves nothing behind, and by
``graphfsdp.check``, which lists.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
import refused_programs
from counting_net import mean_square
from graphfsdp import HazardKind
from graphfsdp.optim import FusedAdam
from helpers import assert_same_state, line_of, snapshot
from mid_forward import Probe, batches, check_refused, make_probe, refusal_of
from refused_programs import REFUSED, Refused

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
        self.num_steps = self.num_steps + 1  # counted


class _Own(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()


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
    "float_lr": (
        lambda: with_optimizer(lambda params: _Own(params, lr=0.1)),
        *(HazardKind.BAKED_NUMBER, "lr=0.1 of group 0 of _Own is a Python number", None),
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
    "loss_is_no_scalar": (
        lambda: made(loss_fn=lambda model, x: model(x)),
        *(LOSS, "a tensor of shape (8, 4)", graphfsdp.InvalidLossError),
    ),
    "loss_without_gradient": (
        lambda: made(loss_fn=lambda model, x: model(x).detach().mean()),
        *(LOSS, "no trainable parameter contributed", graphfsdp.InvalidLossError),
    ),
    "number_beside_the_loss": (
        lambda: made(loss_fn=lambda model, x: (model(x).mean(), 3.0)),
        *(LOSS, "returned a float beside the loss", graphfsdp.InvalidLossError),
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
def test_capture_refuses_wrong_settings(name: str) -> None:
    make, kind, said, error = SETTINGS[name]
    assert error is not None
    arguments = make()
    with pytest.raises(error) as caught:  # noqa: PT012
        step = graphfsdp.capture(**arguments, warmup_steps=1)
        for _ in range(3):
            step(torch.randn(8, 4))
    if kind is not HazardKind.EXCEPTION:
        assert said in str(caught.value)
        assert kind is HazardKind.PRECISION or "Remedy: " in str(caught.value)
    if isinstance(caught.value, graphfsdp.CaptureError):
        assert caught.value.kind is kind
        if name == "optimizer_that_counts":
            assert caught.value.source is not None
            assert caught.value.source.line == line_of(_Counting.step, "# counted")


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_mode_is_named_where_it_looks_at_gradients(check_nan: bool) -> None:
    model = nn.Linear(4, 2)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters()), "warmup_steps": 1}
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=check_nan),
        graphfsdp.capture(model, loss_fn=mean_square, **options) as step,
    ):
        step(torch.ones(3, 4))
        if not check_nan:
            step(torch.ones(3, 4))
            step(torch.ones(3, 4))
            assert step.phase is graphfsdp.Phase.REPLAY
            return
        with pytest.raises(graphfsdp.CaptureError, match=r"set_detect_anomaly.*check_nan=False"):
            step(torch.ones(3, 4))
