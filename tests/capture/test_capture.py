"""A captured step: its arguments, its phases, what it reads, and what its calls return.

With example_batch there is a graph before the first batch, and training is as if it had not been.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import graphfsdp
from adam_helpers import make_muon
from graphfsdp import Phase
from graphfsdp.optim import FusedAdam
from helpers import (
    NUM_STEPS,
    OPTIMIZERS,
    Batch,
    Case,
    assert_same_run,
    assert_same_state,
    assert_same_states,
    check_against_eager,
    make_optimizer,
    no_host_sync,
    run,
    run_as_eager,
    set_lr,
    snapshot,
)
from make_step import make_step
from zoo import ROWS, ZOO, features, loss_with_extras
from zoo_models import Squared, Statistical


def test_recording_may_be_the_first_call_without_the_optimizer() -> None:
    """On a CPU: libraries of CUDA initialise themselves in a warm-up."""
    cpu = torch.device("cpu")
    expected = run(ZOO["mlp"], "none", cpu, num_steps=5)
    got = run(ZOO["mlp"], "forward_backward", cpu, num_steps=5, warmup_steps=0)
    assert_same_run(expected, got)


@pytest.mark.parametrize("num_calls", [0, 1, 4, 6])
def test_phases_follow_one_another_and_closing_is_final(
    num_calls: int, device: torch.device
) -> None:
    """So is to leave the context, also by an error; and all that more than once."""
    step, model, _, next_batch = make_step(device, warmup_steps=2)
    assert step.__enter__() is step
    for index in range(num_calls):
        assert step.phase is (Phase.WARMUP if index < 3 else Phase.REPLAY)
        step(*next_batch())
    with pytest.raises(KeyError), step:
        raise KeyError
    step.close()
    assert step.phase is Phase.CLOSED
    with pytest.raises(graphfsdp.PhaseError, match=r"closed.*capture again"):
        step(*next_batch())
    assert step.report().phase == "closed"
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


def test_two_steps_over_one_model_take_turns(device: torch.device) -> None:
    """Two losses, each with an optimizer of its own, as adversarial training has them."""

    def train(scope: str) -> list[dict[str, Tensor]]:
        first, model, optim, next_batch = make_step(device, scope=scope, max_grad_norm=0.1)
        other = make_optimizer("sgd", model.parameters(), device)
        second = graphfsdp.capture(
            model, other, scope=scope, loss_fn=lambda model, x: model(-x).exp()
        )
        found = []
        for _ in range(14):
            first(*next_batch())
            second(*next_batch())
            found += [snapshot(model, optim), snapshot(model, other)]
        return found

    assert_same_states(train("none"), train("full_iteration"))


def test_seeding_between_replays_reaches_them(device: torch.device) -> None:
    run_as_eager(ZOO["mlp"], device, between=lambda step, model, at: torch.manual_seed(at // 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_replay_reads_nothing_on_the_host_and_runs_no_python_of_the_iteration(
    optimizer: str, device: torch.device
) -> None:
    step, _, optim, next_batch = make_step(device, "gpt", optimizer, max_grad_norm=1.0)
    for _ in range(5):
        step(*next_batch())
    for index in range(3):
        batch = next_batch()
        set_lr(optim, 0.01 / (index + 1))
        with no_host_sync(device):
            step(*batch)
    seen: set[str] = set()

    def hook(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.add(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    batch = next_batch()
    sys.setprofile(hook)
    try:
        step(*batch)
    finally:
        sys.setprofile(None)
    assert any(name.endswith("runner.py:Runner.run") for name in seen)
    engine = ("/torch/autograd/__init__.py", "/torch/autograd/function.py")
    model_and_optimizer = ("/torch/nn/", "/torch/optim/", "zoo.py", "FusedAdam.step")
    forbidden = (*engine, *model_and_optimizer, "iteration.py")
    assert not [name for name in seen if any(part in name for part in forbidden)]


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, y: [y, y],
        lambda model, x, y: [y, y.t()],
        lambda model, x, y: [y, y[:1], y.view(-1)],
        lambda model, x, y: [x, x, x[:2]],
        lambda model, x, y: [model.layers[0].weight, model.layers[0].weight.data[1:]],
        lambda model, x, y: [y.real, y.detach()],
    ],
    ids=["twice", "transposed", "sliced", "inputs", "weights", "detached"],
)
@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
def test_no_two_outputs_share_memory(
    make: Callable[..., list[Tensor]], scope: str, device: torch.device
) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        y = x * 2
        return model(x), make(model, x, y)

    step, model, _, next_batch = make_step(device, scope=scope, loss_fn=loss_fn)
    kept: list[Tensor] = []
    for _ in range(7):
        loss, outputs = step(*next_batch())
        kept += [loss, *outputs]
    assert not any(tensor.requires_grad for tensor in kept)
    latest = step._runner._recordings.latest
    assert latest is not None
    inside = [*model.parameters(), *latest.inputs.tensors()]
    places = [tensor.untyped_storage().data_ptr() for tensor in (*kept, *inside)]
    numel = [tensor.untyped_storage().nbytes() for tensor in (*kept, *inside)]
    assert all(numel)
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("value", [0.01, 1e9])
def test_grad_norm_is_that_of_the_gradients_before_clipping(
    value: float, device: torch.device
) -> None:
    step, model, _, next_batch = make_step(device, max_grad_norm=float("inf"))
    assert step.grad_norm is None
    norms: list[Tensor] = []
    for _ in range(7):
        step(*next_batch())
        assert step.grad_norm is not None
        norms.append(step.grad_norm)
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert torch.equal(norms[-1], torch.nn.utils.get_total_norm(grads, foreach=True))
    clipped, _, _, next_batch = make_step(device, max_grad_norm=value)
    clipped(*next_batch())
    assert clipped.grad_norm is not None
    assert torch.equal(clipped.grad_norm, norms[0])
    assert len({float(norm) for norm in norms}) == len(norms)


def test_other_results_of_microbatches_are_stacked(device: torch.device) -> None:
    step, model, _, next_batch = make_step(device, "extras", microbatches=3)
    for _ in range(6):
        (x,) = next_batch()
        with torch.no_grad():
            parts = [loss_with_extras(model, part) for part in x.chunk(3)]
        _, extras = step(x)
        for name in ("input", "transposed", "correct"):
            assert torch.equal(extras[name], torch.stack([part[1][name] for part in parts])), name


def test_a_loss_of_one_element_need_not_be_0_dimensional(device: torch.device) -> None:
    case = ZOO["mlp"]
    wide = Case(case.make, case.batch, lambda model, x: model(x).view(1, 1))
    assert run_as_eager(wide, device).outputs[-1][0].shape == (1, 1)


Arguments = dict[str, Any]  # of a capture


def mlp_of_one() -> nn.Module:
    return Squared(nn.Linear(1, 1))


def own(models: Any, optimizers: Any, x: Tensor) -> Tensor:
    raise AssertionError("nothing runs")


class AccelerateWrapper(torch.optim.Optimizer):
    """As Accelerate's: no optimizer of its own."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: object = None) -> None:
        self.optimizer = optimizer
        self.scaler = scaler


class FabricWrapper:
    """A child of what it wraps, made on the way, as Lightning Fabric's are."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})

    def step(self) -> None:
        raise AssertionError("a graph takes the wrapped one's step")


def stepped_by(
    make: Callable[[Any], Any], make_model: Callable[[], nn.Module] = mlp_of_one, **options: Any
) -> Arguments:
    """Return arguments of a capture whose optimizer is made of the model's parameters."""
    model = make_model()
    return {"model": model, "optimizer": make(model.parameters()), **options}


def several(*others: Any, **options: Any) -> Arguments:
    """Return arguments of a capture of sequences, to which something is added."""
    model = mlp_of_one()
    return {"model": [model], "optimizer": [FusedAdam(model.parameters()), *others], **options}


REFUSED: list[tuple[Arguments | Callable[[], Arguments], str]] = [
    ({"scope": "everything"}, "'everything'.*'none', 'forward_backward', 'full_iteration'"),
    ({"warmup_steps": 0}, "warmup_steps.*at least 1, got 0"),
    ({"warmup_steps": -1, "scope": "none"}, "warmup_steps.*got -1"),
    ({"warmup_steps": True}, "warmup_steps.*got True"),
    ({"warmup_steps": 2.0}, r"warmup_steps.*got 2\.0"),
    ({"microbatches": 0}, "microbatches.*at least 1, got 0"),
    ({"max_grad_norm": 0.0}, r"max_grad_norm.*positive.*got 0\.0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm.*got nan"),
    ({"max_grad_norm": "1"}, "max_grad_norm"),
    ({"skip_nonfinite": "no"}, "skip_nonfinite must be True or False, got 'no'"),
    ({"backend": "tpu"}, "'tpu'.*'auto', 'cuda' or 'cpu'"),
    ({"on_change": 0}, "on_change"),
    ({"compile": True, "scope": "none"}, "compile=True compiles what was captured, and scope"),
    ({"compile": "always"}, "unknown compile 'always'; expected one of False, True, 'auto'"),
    ({"max_graphs": 0}, "max_graphs"),
    ({"loss_fn": 3}, "loss_fn"),
    ({"mp_policy": "bf16"}, "mp_policy"),
    *(
        ({"audit": audit}, "audit must be 'auto', or a number of replays")
        for audit in (-1, True, "always", 1.5)
    ),
    ({"model": mlp_of_one}, r"model must be.*got function"),
    ({"optimizer": nn.Linear(1, 1)}, r"optimizer must be.*got Linear"),
    (
        lambda: stepped_by(lambda _: FusedAdam(nn.Linear(2, 1).parameters())),
        "holds none of the model's 2 trainable",
    ),
    (
        lambda: stepped_by(lambda params: AccelerateWrapper(FusedAdam(params), object())),
        r"accelerate's AccelerateWrapper.*mixed_precision='bf16'",
    ),
    (
        lambda: stepped_by(
            FusedAdam, lambda: nn.Sequential(nn.Tanh(), DataParallel(nn.Linear(2, 1)))
        ),
        r"'1' is wrapped in DataParallel.*no_shard",
    ),
    (
        lambda: stepped_by(
            lambda params: torch.optim.SGD(params, lr=0.1),
            lambda: nn.Sequential(nn.LazyLinear(4)),
        ),
        r"'0\.weight'.*no shape yet.*run the model",
    ),
    *(
        (partial(stepped_by, torch.optim.LBFGS, scope=scope), "LBFGS")
        for scope in ("none", "forward_backward", "full_iteration")
    ),
    ({"iteration": 3}, "iteration must be a function"),
    ({"iteration": own, "microbatches": 2}, "microbatches.*split the batch"),
    ({"iteration": own, "max_grad_norm": 1.0}, "clip_grad_norm_ in iteration"),
    (
        {"iteration": own, "scope": "forward_backward"},
        "loss_fn= in place of iteration=.*capture_in_place",
    ),
    (lambda: several(), "model is a sequence.*iteration=fn"),
    (lambda: several(model=[mlp_of_one(), 3], iteration=own), "model must be"),
    (lambda: several(optimizer=[], iteration=own), "optimizer is an empty sequence"),
    (
        lambda: several(
            FusedAdam(mlp_of_one().parameters(), use_decoupled_grad=True), iteration=own
        ),
        "use_decoupled_grad",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_arguments_that_cannot_work_are_refused(
    arguments: Arguments | Callable[[], Arguments], words: str
) -> None:
    chosen = arguments() if callable(arguments) else arguments
    with pytest.raises(graphfsdp.ConfigError, match=words):
        graphfsdp.capture(**{**stepped_by(FusedAdam), **chosen})


def test_an_optimizer_may_hold_a_part_of_the_parameters() -> None:
    model = nn.Linear(2, 1)
    graphfsdp.capture(model, FusedAdam([model.bias])).close()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GRAPHFSDP_AUDIT", "often", "GRAPHFSDP_AUDIT must be 'auto' or a number"),
        ("CXX", "/nowhere/c++", r"needs a C\+\+ compiler.*Remedy: install g\+\+"),
    ],
)
def test_an_environment_in_which_it_cannot_work_is_refused(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(graphfsdp.ConfigError, match=words):
        graphfsdp.capture(**stepped_by(FusedAdam, compile=name == "CXX"))


def test_a_backend_for_another_device_is_refused(device: torch.device) -> None:
    model = mlp_of_one().to(device)
    other = "cuda" if device.type == "cpu" else "cpu"
    with pytest.raises(graphfsdp.ConfigError, match=f"'{other}' backend.*Remedy"):
        graphfsdp.capture(model, FusedAdam(model.parameters()), backend=other)


def replace_layer(model: nn.Module) -> None:
    vars(model)["_modules"]["layers"] = nn.Sequential(nn.Linear(1, 1))


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize(
    ("change", "scopes", "message"),
    [
        (nn.Module.double, ("full_iteration", "none"), "float32 .*, and is now a torch.float64"),
        (nn.Module.half, ("forward_backward", "none"), "float32 .*, and is now a torch.float16"),
        # Eagerly the parameters that there are now are trained.
        (
            lambda model: model.to("meta"),
            ("full_iteration",),
            "float32 .* on cpu, and is now .* on meta",
        ),
        (replace_layer, ("full_iteration",), "float32 .*, and is now another one, a torch.float32"),
    ],
    ids=["double", "half", "meta", "replaced"],
)
def test_a_model_that_is_changed_before_its_capture_is_refused(
    num_before: int, change: Callable[[nn.Module], object], scopes: tuple[str, ...], message: str
) -> None:
    for scope in scopes:
        model = mlp_of_one()
        with graphfsdp.capture(model, FusedAdam(model.parameters()), scope=scope) as step:
            for _ in range(num_before):
                step(torch.ones(2, 1))
            change(model)
            text = rf"'layers.0.weight' was a torch.{message}.*1 more.*Remedy: change"
            with pytest.raises(graphfsdp.GuardError, match=text):
                step(torch.ones(2, 1))


class Codebook(nn.Module):
    """A weight that the forward pass moves: by another parameter in its place, or in place."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.codes = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            codes = 0.9 * self.codes + 0.1 * x.mean(0)
            if self.replaces:
                self.codes = nn.Parameter(codes)
            else:
                self.codes.copy_(codes)
        return (x * self.scale - self.codes.detach()).square().mean()


def test_a_parameter_that_a_forward_pass_replaces_is_refused_with_a_remedy_that_works() -> None:
    model = Codebook(replaces=True)
    with graphfsdp.capture(model, FusedAdam(model.parameters())) as step:
        step(torch.ones(2, 3))
        with pytest.raises(graphfsdp.GuardError, match=r"writes into it instead \(copy_"):
            step(torch.ones(2, 3))
    check_against_eager(Case(lambda: Codebook(replaces=False), features(3)), torch.device("cpu"))


@pytest.mark.parametrize("wrap", [AccelerateWrapper, FabricWrapper])
def test_a_wrapper_is_taken_off_an_optimizer_whatever_its_class(wrap: Any) -> None:
    model = nn.Linear(4, 2)
    inner = FusedAdam(model.parameters())
    with graphfsdp.capture(model, wrap(inner), loss_fn=lambda m, x: m(x).square().mean()) as step:
        for _ in range(6):
            step(torch.randn(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY
    assert inner.state


Params = list[nn.Parameter]
MUON = partial(make_muon, lr=1e-2)
EXAMPLE = torch.full((ROWS, 5), 7.0)


class Model(Statistical):
    """With a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(3)
        torch.rand(1, generator=self.generator, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator, device=x.device))


@pytest.fixture
def model(device: torch.device) -> Model:
    return Model(device).to(device)


def fused_adam(params: Params) -> torch.optim.Optimizer:
    return FusedAdam(params, weight_decay=0.1, amsgrad=True, skip_nonfinite=True)


def sgd(params: Params) -> torch.optim.Optimizer:
    """Return one whose first step is not one from a momentum of zero."""
    lr = torch.tensor(1e-2, device=params[0].device)
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, fused=True)


def trained_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train, as before a checkpoint that was loaded."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 5).to(next(model.parameters()).device)).backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("optimizer", "setup"),
    [*itertools.product([fused_adam, "adamw", sgd], [None, trained_before]), (MUON, None)],
)
def test_training_is_the_one_that_captured_on_its_way(
    optimizer: Any, setup: Any, device: torch.device
) -> None:
    case = Case(lambda: Model(device), features(5), setup=setup)
    options: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 1.0}
    expected = run(case, "none", device, **options)
    got = run(case, "full_iteration", device, example_batch=(EXAMPLE.to(device),), **options)
    assert_same_run(expected, got)
    assert got.report.num_captures == 1
    eager = 0 if setup or optimizer in (fused_adam, MUON) else 1
    assert got.report.num_calls.get("eager", 0) == eager
    assert got.report.num_calls["replay"] == NUM_STEPS - eager


@pytest.mark.parametrize("scope", ["forward_backward", "none"])
def test_other_scopes(scope: str, device: torch.device) -> None:
    case = Case(lambda: Model(device), features(5))
    got = run(case, scope, device, optimizer="adamw", example_batch=EXAMPLE.to(device))
    assert_same_run(run(case, "none", device, optimizer="adamw"), got)
    assert got.report.num_captures == (scope != "none")


def test_keyword_batches_microbatches_and_another_shape_later(device: torch.device) -> None:
    def keywords(generator: torch.Generator) -> Batch:
        rows = 6 if torch.rand((), generator=generator) < 0.5 else 4
        return Batch(kwargs={"x": torch.randn(rows, 5, generator=generator)})

    case = Case(lambda: Model(device), keywords, lambda model, *, x: model(x))
    options: dict[str, Any] = {"microbatches": 2, "on_change": "recapture"}
    example = {"x": torch.zeros(6, 5, device=device)}
    got = run(case, "full_iteration", device, example_batch=example, **options)
    assert_same_run(run(case, "none", device, **options), got)
    assert got.report.num_captures == 2


def test_a_capture_leaves_no_trace_and_refuses_a_batch_unlike_the_example(
    model: Model, device: torch.device
) -> None:
    optimizer = FusedAdam(model.parameters())
    model.kept = torch.zeros((), device=device)
    before = snapshot(model, optimizer)
    with graphfsdp.capture(model, optimizer, example_batch=EXAMPLE.to(device)) as step:
        assert step.phase is Phase.REPLAY
        assert not any(each.any() for state in optimizer.state.values() for each in state.values())
        optimizer.state.clear()
        # Of the example: nobody reads it before the first step.
        model.kept = torch.zeros((), device=device)
        assert_same_state(before, snapshot(model, optimizer))
        with pytest.raises(graphfsdp.BatchMismatchError, match=r"\(12, 5\).*\(4, 5\)"):
            step(torch.zeros(4, 5, device=device))


def test_an_iteration_that_cannot_be_captured_is_refused_at_once_without_a_trace(
    model: Model,
) -> None:
    optimizer = FusedAdam(model.parameters())
    before = snapshot(model, optimizer)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        return loss * loss.item()

    with pytest.raises(graphfsdp.CaptureError, match="_local_scalar_dense"):
        graphfsdp.capture(model, optimizer, loss_fn=loss_fn, example_batch=EXAMPLE)
    assert_same_state(before, snapshot(model, optimizer))
    with graphfsdp.capture(model, optimizer) as step:
        for _ in range(5):
            step(EXAMPLE)
