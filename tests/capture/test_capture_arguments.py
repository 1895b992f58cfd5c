"""Arguments of `graphfsdp.capture` that cannot work are refused before anything runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Case, check_against_eager
from zoo import features
from zoo_models import Squared


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": "everything"}, "'everything'.*'none', 'forward_backward', 'full_iteration'"),
        ({"warmup_steps": 0}, "warmup_steps.*at least 1, got 0"),
        ({"warmup_steps": -1, "scope": "none"}, "warmup_steps.*got -1"),
        ({"warmup_steps": True}, "warmup_steps.*got True"),
        ({"warmup_steps": 2.0}, r"warmup_steps.*got 2\.0"),
        ({"microbatches": 0}, "microbatches.*at least 1, got 0"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm.*positive.*got 0\.0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm.*got nan"),
        ({"backend": "tpu"}, "'tpu'.*'auto', 'cuda' or 'cpu'"),
        ({"on_change": 0}, "on_change"),
        ({"compile": True, "scope": "none"}, "compile=True compiles what was captured, and scope"),
        ({"compile": "always"}, "unknown compile 'always'; expected one of False, True, 'auto'"),
        ({"max_graphs": 0}, "max_graphs"),
        ({"loss_fn": 3}, "loss_fn"),
        ({"mp_policy": "bf16"}, "mp_policy"),
        ({"max_grad_norm": "1"}, "max_grad_norm"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    model = mlp_of_one()
    with pytest.raises(graphfsdp.ConfigError, match=message):
        graphfsdp.capture(model, FusedAdam(model.parameters()), **options)


def mlp_of_one() -> nn.Module:
    return Squared(nn.Linear(1, 1))


def test_a_backend_for_another_device_is_refused(device: torch.device) -> None:
    model = mlp_of_one().to(device)
    other = "cuda" if device.type == "cpu" else "cpu"
    with pytest.raises(graphfsdp.ConfigError, match=f"'{other}' backend.*Remedy"):
        graphfsdp.capture(model, FusedAdam(model.parameters()), backend=other)


def test_what_is_no_model_or_no_optimizer_is_refused() -> None:
    model = mlp_of_one()
    with pytest.raises(graphfsdp.ConfigError, match=r"model must be.*got function"):
        graphfsdp.capture(mlp_of_one, FusedAdam(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(graphfsdp.ConfigError, match=r"optimizer must be.*got Linear"):
        graphfsdp.capture(model, nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("scope", ["none", "forward_backward", "full_iteration"])
def test_lbfgs_is_refused(scope: str) -> None:
    model = mlp_of_one()
    with pytest.raises(graphfsdp.ConfigError, match="LBFGS"):
        graphfsdp.capture(model, torch.optim.LBFGS(model.parameters()), scope=scope)


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


class Wrapper:
    """A child of what it wraps, made on the way, as Lightning Fabric's are."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__class__ = type("Wrapped", (type(self), type(optimizer)), {})

    def step(self) -> None:
        raise AssertionError("a graph takes the wrapped one's step")


def test_a_wrapper_is_taken_off_an_optimizer_whatever_its_class() -> None:
    model = nn.Linear(4, 2)
    wrapped: Any = Wrapper(FusedAdam(model.parameters()))
    with graphfsdp.capture(model, wrapped, loss_fn=lambda m, x: m(x).square().mean()) as step:
        for _ in range(6):
            step(torch.randn(3, 4))
        assert step.phase is graphfsdp.Phase.REPLAY
