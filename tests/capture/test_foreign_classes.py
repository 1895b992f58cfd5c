"""Models and optimizers whose tables, lists or hooks are not as torch's own classes have them."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphfsdp
import parts_helpers
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_state, run_as_eager, same_bits, snapshot
from zoo import features

CPU = torch.device("cpu")
X = torch.ones(6, 4)
Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class FrozenDict(OrderedDict[str, Any]):
    """Refuses every change once it is made, as the configurations of diffusers do."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.is_frozen = True

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a FrozenDict cannot be changed")

    update = setdefault = pop = __delitem__ = refuse

    def __setitem__(self, name: str, value: Any) -> None:
        if hasattr(self, "is_frozen"):
            self.refuse()
        super().__setitem__(name, value)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        self._internal_dict = FrozenDict(scale=0.5, sizes=[1, 2])

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x).square().mean() * self._internal_dict["scale"]
        return loss


class Listed(nn.Module):
    """Has a ``parameters()`` that returns a list, and takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4))])

    def parameters(self, recurse: bool = True) -> Any:
        return self.vars

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.vars[0], self.vars[1]).square().mean()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.norm(self.first(x))).square().mean()
        return loss


class Output(FrozenDict):
    @property
    def loss(self) -> Any:
        return self["loss"]


class Answering(Plain):
    """Returns an output of a class of its own, which pytree does not know."""

    def forward(self, x: Tensor) -> Any:
        return Output(loss=super().forward(x))


class Placeless(Plain):
    """Makes tensors without a device, as whoever writes for a CPU does."""

    def forward(self, x: Tensor) -> Tensor:
        row = functional.embedding(torch.full((x.shape[0],), 1), self.second.weight)
        return super().forward(x + torch.zeros(x.shape[0], 4) + row)


class Wrapper(torch.optim.Optimizer):
    """Never calls ``Optimizer.__init__``, as many that are written around another one do."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.inner = torch.optim.Adam(params, lr=0.01)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def scripted(value: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, in words and kinds that torch changes
        return torch.jit.script(value)


def half_scripted() -> nn.Module:
    model = Plain()
    model.first = scripted(model.first)
    return model


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for _ in range(14):
        optimizer.zero_grad()
        output = model(torch.randn(6, 4))
        loss: Tensor = getattr(output, "loss", output)
        loss.backward()
        optimizer.step()
        yield loss


def check_in_place(make: Make, make_optimizer: MakeOptimizer = adam) -> None:
    def seeded() -> nn.Module:
        torch.manual_seed(5)
        return make()

    parts_helpers.check(plainly, seeded, lambda model: make_optimizer(model.parameters()))


def check_captured(make: Make, make_optimizer: MakeOptimizer = adam, **options: Any) -> None:
    options["optimizer"] = make_optimizer
    run_as_eager(Case(make, features(4)), CPU, beside="plain", **options)


@pytest.mark.parametrize("make", [Configured, Listed, Answering, Placeless])
def test_both_doors_and_a_check_take_the_model(make: Make) -> None:
    check_captured(make)
    check_in_place(make)
    model = make()
    report = graphfsdp.check(model, adam(model.parameters()), X)
    assert report.ok, report


def test_an_optimizer_without_hooks_is_captured_outside_of_the_graph() -> None:
    check_in_place(Plain, Wrapper)
    with pytest.raises(graphfsdp.CaptureError, match=r"Adam.step.*scope='forward_backward'"):
        check_captured(Plain, Wrapper)
    check_captured(Plain, Wrapper, scope="forward_backward")
    model = Plain()
    report = graphfsdp.check(model, Wrapper(model.parameters()), X, scope="forward_backward")
    assert report.ok, report


@pytest.mark.parametrize(
    ("make", "where"), [(lambda: scripted(Plain()), "the model"), (half_scripted, "module 'first'")]
)
def test_torchscript_is_refused_by_name_and_the_ways_out_work(make: Make, where: str) -> None:
    model = make()
    optimizer = adam(model.parameters())
    message = f"{where} is TorchScript.*capture_in_place.*scope='none'"
    with pytest.raises(graphfsdp.ConfigError, match=message):
        graphfsdp.capture(model, optimizer)
    report = graphfsdp.check(model, optimizer, X)
    assert "is TorchScript" in str(report.hazards[0].why)
    check_in_place(make)
    check_captured(lambda: nn.Sequential(make()), scope="none")  # a hook counts calls


def test_torchscript_beside_the_model_is_refused_by_name() -> None:
    critic, model = scripted(Plain()), Plain()
    options: Any = {"loss_fn": lambda model, x: model(critic(x) + x), "warmup_steps": 1}
    with graphfsdp.capture(model, adam(model.parameters()), **options) as step:
        step(X)
        with pytest.raises(graphfsdp.CaptureError, match=r"is TorchScript.*capture_in_place"):
            step(X)


def test_a_function_of_torchscript_is_captured() -> None:
    @scripted
    def gate(x: Tensor, scale: float) -> Tensor:
        return x * torch.sigmoid(x * scale)

    class Gated(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(gate(self.second(x), 0.5))

    check_captured(Gated)


@pytest.mark.parametrize("make", [Configured, Listed])
def test_a_failed_iteration_of_any_class_of_module_is_undone(make: Make) -> None:
    model = make()
    optimizer = FusedAdam(model.parameters())
    before, first = snapshot(model, optimizer), next(iter(model.parameters())).detach().clone()

    def fails(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        for _ in plainly(model, optimizer):
            assert not same_bits(first, next(iter(model.parameters())))
        raise KeyError("of the user's")

    step = graphfsdp.capture(model, optimizer, iteration=fails)
    with pytest.raises(KeyError):
        step(X)
    assert_same_state(before, snapshot(model, optimizer))
