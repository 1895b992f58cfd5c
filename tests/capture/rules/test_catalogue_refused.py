"""Every known way in which a captured training step goes wrong, and its exact diagnosis.

Programs come from refused_programs.py (operators) and misbehaving.py (everything else); below
are the ones that are wrong in their settings. Each is judged twice: by ``capture``, which raises,
and by ``graphfsdp.check``, which lists.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
import misbehaving
from graphfsdp import HazardKind
from graphfsdp.optim import DeviceGradScaler, FusedAdam
from helpers import assert_same_state, line_of, quick_garbage_collection, snapshot
from misbehaving import MISBEHAVIOURS
from probe import Probe, Program, batches, make_probe
from refused_programs import GENERATOR, HOST, RULES, SHAPE

CPU = torch.device("cpu")
KINDS = {
    HOST: HazardKind.HOST_READ,
    SHAPE: HazardKind.DYNAMIC_SHAPE,
    GENERATOR: HazardKind.GENERATOR,
    "runs a Python function on every element": HazardKind.HIDDEN_WRITE,
    "draws from a random generator that is as new": HazardKind.GENERATOR,
    "grows a storage inside the iteration": HazardKind.MEMORY,
    "layout torch.sparse_coo has no storage": HazardKind.MEMORY,
}
# What only a recording on a CPU minds; a check judges by the operators that it sees.
ONLY_RECORDED = ("new_generator", "grown_storage")


def checked(program: Program, target: str) -> graphfsdp.CheckReport:
    """Check a probe that runs a program; nothing may change."""
    quick_garbage_collection()
    torch.manual_seed(11)
    model = Probe(program)
    model.body.inner.attribute = torch.ones(4)
    optim = FusedAdam(model.parameters(), lr=0.01)
    before = snapshot(model, optim)
    report = graphfsdp.check(model, optim, batches(CPU, 1)[0], target=target)
    assert_same_state(before, snapshot(model, optim), "after the check")
    return report


def test_the_catalogue_has_at_least_forty_programs_of_many_kinds() -> None:
    assert len(RULES) + len(MISBEHAVIOURS) + len(SETTINGS) >= 85
    kinds = {case.kind for case in MISBEHAVIOURS.values()} | set(KINDS.values())
    assert len(kinds | {kind for _, kind, *_ in SETTINGS.values()}) >= 14


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", [name for name in RULES if name not in ONLY_RECORDED])
def test_check_lists_what_the_rules_refuse(name: str) -> None:
    rule = RULES[name]
    report = checked(rule.program, "cpu")
    line = line_of(rule.program, "# refused")
    found = [
        hazard
        for hazard in report.hazards
        if hazard.source is not None
        and hazard.source.line == line
        and re.fullmatch(rule.op, hazard.op or "")
    ]
    assert found, str(report)
    assert found[0].kind is KINDS[rule.message]
    assert rule.message in found[0].why
    assert found[0].fix
    assert found[0].module_path == "body.inner"
    if found[0].kind in (HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE):
        assert found[0].cuda_error == 900


@pytest.mark.parametrize("name", MISBEHAVIOURS)
def test_check_names_every_misbehaviour(name: str) -> None:
    case = MISBEHAVIOURS[name]
    report = checked(case.program, "cuda")
    hazards = [hazard for hazard in report.hazards if hazard.kind is case.kind]
    assert hazards, str(report)
    hazard = hazards[0]
    assert case.op is None or re.fullmatch(case.op, hazard.op or ""), hazard.op
    assert case.why in hazard.why
    assert case.fix in hazard.fix
    if case.has_line:
        assert hazard.source is not None
        assert hazard.source.file == misbehaving.__file__
        assert hazard.source.line == line_of(case.program, "# refused")


@pytest.mark.parametrize("name", [n for n, case in MISBEHAVIOURS.items() if not case.captured])
def test_capture_refuses_every_misbehaviour_that_it_can_see(name: str) -> None:
    case = MISBEHAVIOURS[name]
    error = caught_by_capture(case.program)
    assert error.kind is case.kind
    assert case.op is None or re.fullmatch(case.op, error.op or ""), error.op
    assert case.why in str(error)
    assert case.fix in str(error).partition("Remedy: ")[2]
    if case.has_line:
        assert error.source is not None
        assert error.source.line == line_of(case.program, "# refused")


def caught_by_capture(program: Program) -> graphfsdp.CaptureError:
    """Train a probe until it is refused; everything is then as it was."""
    step, model, optim = make_probe(program, CPU)
    for x in batches(CPU, 3):
        step(x)
    before = snapshot(model, optim)
    with pytest.raises(graphfsdp.CaptureError) as caught:
        step(batches(CPU, 1)[0])
    assert_same_state(before, snapshot(model, optim), "after the roll-back")
    return caught.value


def squared(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


Made = dict[str, Any]


def made(**changed: Any) -> Made:
    """Return arguments of a good step, some of them changed."""
    model = changed.pop("model", None) or nn.Linear(4, 4)
    optimizer = changed.pop("optimizer", None) or FusedAdam(model.parameters())
    return {"model": model, "optimizer": optimizer, "loss_fn": squared, **changed}


def with_optimizer(make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]) -> Made:
    model = nn.Linear(4, 4)
    return made(model=model, optimizer=make(model.parameters()))


class _Counting(torch.optim.SGD):
    """Counts its steps in Python."""

    num_steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.num_steps = self.num_steps + 1


def scaled_and_clipped() -> Made:
    model = nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters(), grad_scaler=DeviceGradScaler())
    return made(model=model, optimizer=optimizer, max_grad_norm=1.0)


def frozen() -> Made:
    model = nn.Linear(4, 4)
    return made(model=model.requires_grad_(False), optimizer=FusedAdam(model.parameters()))


def half_on_meta() -> Made:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    return made(model=model, optimizer=FusedAdam(model[0].parameters()))


def unused() -> Made:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return made(model=model, loss_fn=lambda model, x: model[0](x).mean())


# name: (arguments, kind, part of what check says, error of capture or None, op or None)
Setting = tuple[Callable[[], Made], HazardKind, str, type[Exception] | None]
SETTINGS: dict[str, Setting] = {
    "adamw_not_fused": (
        lambda: with_optimizer(torch.optim.AdamW),
        HazardKind.OPTIMIZER,
        "counts its steps on the host",
        graphfsdp.ConfigError,
    ),
    "lbfgs": (
        lambda: with_optimizer(torch.optim.LBFGS),
        HazardKind.OPTIMIZER,
        "as often as it likes",
        graphfsdp.ConfigError,
    ),
    "optimizer_that_counts": (
        lambda: with_optimizer(lambda params: _Counting(params, lr=0.1)),
        HazardKind.OPTIMIZER,
        "changed the number 'num_steps'",
        graphfsdp.CaptureError,
    ),
    "float_lr": (
        lambda: with_optimizer(lambda params: torch.optim.SGD(params, lr=0.1)),
        HazardKind.BAKED_NUMBER,
        "lr=0.1 of group 0 of SGD is a Python number",
        None,
    ),
    "precision_clash": (
        lambda: made(mp_policy=graphfsdp.MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)),
        HazardKind.PRECISION,
        "bfloat16",
        graphfsdp.PrecisionError,
    ),
    "clip_of_scaled_gradients": (
        scaled_and_clipped,
        HazardKind.CONFIG,
        "the loss scale has multiplied",
        graphfsdp.ConfigError,
    ),
    "nothing_to_train": (
        frozen,
        HazardKind.CONFIG,
        "there is nothing to train",
        graphfsdp.ConfigError,
    ),
    "two_devices": (
        half_on_meta,
        HazardKind.CONFIG,
        "one graph lies on one device",
        graphfsdp.ConfigError,
    ),
    "odd_microbatches": (
        lambda: made(microbatches=3),
        HazardKind.CONFIG,
        "cannot be split on dim 0 into 3",
        graphfsdp.ConfigError,
    ),
    "loss_is_no_scalar": (
        lambda: made(loss_fn=lambda model, x: model(x)),
        HazardKind.LOSS,
        "a tensor of shape (8, 4)",
        graphfsdp.InvalidLossError,
    ),
    "loss_without_gradient": (
        lambda: made(loss_fn=lambda model, x: model(x).detach().mean()),
        HazardKind.LOSS,
        "no trainable parameter contributed",
        graphfsdp.InvalidLossError,
    ),
    "number_beside_the_loss": (
        lambda: made(loss_fn=lambda model, x: (model(x).mean(), 3.0)),
        HazardKind.LOSS,
        "returned a float beside the loss",
        graphfsdp.InvalidLossError,
    ),
    "parameter_without_gradient": (
        unused,
        HazardKind.GRADIENT,
        "'1.weight', '1.bias': no gradient",
        None,
    ),
    "broken_loss_function": (
        lambda: made(loss_fn=lambda model, x: model(x[0, 0, 0])),
        HazardKind.EXCEPTION,
        "raises IndexError",
        IndexError,
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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Capture, and go on until the first replay."""
    step = graphfsdp.capture(model, optimizer, warmup_steps=1, **options)
    for _ in range(3):
        step(torch.randn(8, 4))


@pytest.mark.parametrize("name", [n for n, (*_, error) in SETTINGS.items() if error is not None])
def test_capture_refuses_wrong_settings(name: str) -> None:
    make, kind, said, error = SETTINGS[name]
    assert error is not None
    quick_garbage_collection()
    arguments = make()
    with pytest.raises(error) as caught:
        train(**arguments)
    if kind is not HazardKind.EXCEPTION:
        assert said in str(caught.value)
    if isinstance(caught.value, graphfsdp.CaptureError):
        assert caught.value.kind is kind
