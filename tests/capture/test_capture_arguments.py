"""Arguments of `graphfsdp.capture` that cannot work are refused before anything runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Case, check_against_eager
from zoo import features
from zoo_models import Squared

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


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


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
        (functools.partial(stepped_by, lbfgs, scope=scope), "LBFGS")
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
