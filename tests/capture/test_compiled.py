"""torch.compile and autocast: captured on CUDA, compiled regions refused by name on a CPU."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from counting_net import mean_square
from cuda_stand_in.library import computes
from graphfsdp.optim import FusedAdam
from helpers import Case, assert_same_run, run
from sharding_helpers import assert_equal_tensors
from stand_in_compilers import compiling_models_by as compiling_by
from zoo import features

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is"),
    # torch.compile hides these by itself, which does not help where warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    # Inductor's advice on GPUs that have them.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def wholly_compiled() -> nn.Module:
    module = torch.compile(make_model(), backend="eager")
    assert isinstance(module, nn.Module)
    return module


def partly_compiled() -> nn.Module:
    model = make_model()
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "where"), [(wholly_compiled, "the model"), (partly_compiled, "module '0'")]
)
def test_compiled_modules_are_refused_on_a_cpu_before_anything_runs(
    make: Callable[[], nn.Module], where: str
) -> None:
    model = make()
    optimizer = FusedAdam(model.parameters())
    with pytest.raises(graphfsdp.ConfigError, match=f"{where} is compiled by torch.compile"):
        graphfsdp.capture(model, optimizer, loss_fn=mean_square)
    graphfsdp.capture(model, optimizer, loss_fn=mean_square, scope="none").close()  # eager: fine


class Block(nn.Module):
    """A module of the user's own: torch's modules alone are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(x).relu() * self.scale
        return out


class Backend:
    """Runs what torch.compile has traced as it is, and counts, in memory that no snapshot sees."""

    def __init__(self) -> None:
        self._counts = (ctypes.c_long * 4)()

    def take_counts(self) -> list[int]:
        """Return compilations outside and inside of captures, then runs outside and inside."""
        counts = list(self._counts)
        self._counts[:] = [0] * len(counts)
        return counts

    def __call__(self, traced: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        self._counts[0 + torch.cuda.is_current_stream_capturing()] += 1

        def run_traced(*args: Tensor) -> Any:
            self._counts[2 + torch.cuda.is_current_stream_capturing()] += 1
            return traced(*args)

        return run_traced


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["the model", "a module", "a function of the loss"])
@pytest.mark.parametrize("backend", [Backend(), "inductor"], ids=["as_traced", "inductor"])
def test_compiled_code_is_in_the_graph(backend: Backend | str, compiled: str) -> None:
    """Warm-ups compile; the capture runs what they have compiled, and compiles nothing more."""
    compile_it: Callable[[Any], Any] = partial(torch.compile, backend=backend)

    def make() -> nn.Module:
        torch._dynamo.reset()
        model = nn.Sequential(Block(), nn.Linear(8, 1))
        if compiled == "a module":
            model[0].compile(backend=backend)
        return compile_it(model) if compiled == "the model" else model

    def reduced(out: Tensor) -> Tensor:
        return out.square().mean()

    reduce = compile_it(reduced) if compiled == "a function of the loss" else reduced

    def compiled_loss(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = reduce(model(x))
        return loss

    device = torch.device("cuda")
    case = Case(make, features(4), compiled_loss)
    expected = run(case, "none", device)
    if isinstance(backend, Backend):
        backend.take_counts()
    got = run(case, "full_iteration", device)
    if computes():
        assert_same_run(expected, got)
    assert got.report.num_captures == 1
    if isinstance(backend, Backend):
        assert backend.take_counts() == [1, 0, 3, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["first call", "second call", "other number"])
def test_what_no_warm_up_has_compiled_for_a_capture_is_warmed_up_once_more(
    late: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was watched when it came, or came with the capture; and no audit can watch it."""
    made: list[Callable[..., Tensor]] = []
    number = [2.0]

    def compiles_late(model: nn.Module, x: Tensor) -> Tensor:
        if not made:
            made.append(torch.compile(torch.mul, backend="eager"))
        return made[0](model(x), number[0]).square().mean()

    def losses(**options: Any) -> list[Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(1)
        made[:], number[0] = [], 2.0
        if late == "second call":
            made.append(torch.mul)
        elif late == "other number":
            made.append(torch.compile(torch.mul, backend="eager"))
        model = make_model().cuda()
        optimizer = FusedAdam(model.parameters())
        with graphfsdp.capture(model, optimizer, loss_fn=compiles_late, **options) as step:
            found = [step(torch.randn(12, 4, device="cuda"))]
            if late == "second call":
                made.clear()
            elif late == "other number":
                number[0] = 3.0
            found += [step(torch.randn(12, 4, device="cuda")) for _ in range(12)]
            counts.update(step.report().num_calls)
        return found

    counts: dict[str, int] = {}
    expected = losses(scope="none")
    counts.clear()
    assert_equal_tensors(expected, losses(warmup_steps=1, audit=1))
    # Before torch 2.14 a capture compiles, too.
    again = late != "other number" or hasattr(torch.cuda.CUDAGraph, "pools")
    assert counts == {"warmup": 1 + again, "capture": 1, "replay": 11 - again}
    assert "audit=1 is left out" in caplog.text


@pytest.mark.gpu
def test_what_turns_in_each_run_does_not_seem_to_stand_still() -> None:
    """A capture tries with a watcher first, and runs Python again where it meets compiled code."""
    torch._dynamo.reset()
    turned = {"on": True}
    square = torch.compile(torch.square, backend="eager")

    def turns(model: nn.Module, x: Tensor) -> Tensor:
        turned["on"] = not turned["on"]
        loss: Tensor = square(model(x)).mean() * (2 if turned["on"] else 1)
        return loss

    model = make_model().cuda()
    optimizer = FusedAdam(model.parameters())
    with graphfsdp.capture(model, optimizer, loss_fn=turns, warmup_steps=1) as step:
        step(torch.randn(12, 4, device="cuda"))
        with pytest.raises(graphfsdp.CaptureError, match="'on' of closure variable 'turned'"):
            step(torch.randn(12, 4, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["full_iteration", "forward_backward"])
def test_capture_compiles_the_model_while_the_step_lives(scope: str) -> None:
    """The graph holds what torch.compile makes of the model; eager runs are eager."""
    torch._dynamo.reset()
    backend = Backend()
    device = torch.device("cuda")

    def make() -> nn.Module:
        return nn.Sequential(Block(), nn.Linear(8, 1), nn.Dropout(0.2))

    case = Case(make, features(4), mean_square)
    with compiling_by(backend):
        expected = run(case, "none", device)
        assert backend.take_counts() == [0, 0, 0, 0]
        got = run(case, scope, device, compile=True)
    assert_same_run(expected, got)
    assert backend.take_counts()[:2] == [1, 0]
    assert got.report.num_captures == 1


@pytest.mark.gpu
def test_a_model_is_compiled_no_longer_than_its_step_lives() -> None:
    torch._dynamo.reset()
    model = make_model().cuda()
    optimizer = FusedAdam(model.parameters())
    before = dict(vars(model))
    with compiling_by("eager"):
        with graphfsdp.capture(model, optimizer, loss_fn=mean_square, compile=True) as step:
            assert vars(model) != before
            for _ in range(5):
                step(torch.randn(12, 4, device="cuda"))
            step.evaluate(torch.randn(12, 4, device="cuda"))
            step.evaluate(torch.randn(12, 4, device="cuda"))
            step.verify()
        assert vars(model) == before
        with pytest.raises(graphfsdp.InvalidLossError):
            graphfsdp.capture(
                model,
                optimizer,
                loss_fn=lambda model, x: model(x).mean().item(),
                compile=True,
                example_batch=torch.randn(12, 4, device="cuda"),
            )
    assert vars(model) == before
    with pytest.raises(graphfsdp.ConfigError, match=r"on a CPU alone\. Remedy: compile=True"):
        graphfsdp.capture(model, optimizer, loss_fn=mean_square, compile="auto")
