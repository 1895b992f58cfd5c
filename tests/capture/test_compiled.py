"""torch.compile and autocast: captured on CUDA, compiled regions refused by name on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from graphfsdp._capture.cuda.recorder import UnwatchedRecorder
from graphfsdp._capture.trace.source import has_compiled_regions
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, assert_same_run, check_against_eager, run

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile.module.`:UserWarning")


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))


def batch(generator: torch.Generator) -> Batch:
    return Batch((torch.randn(12, 4, generator=generator),))


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
        graphfsdp.capture(model, optimizer, loss_fn=loss_fn)
    graphfsdp.capture(model, optimizer, loss_fn=loss_fn, scope="none").close()  # eager: fine
    assert has_compiled_regions(model)
    assert not has_compiled_regions(make_model())


def test_nothing_is_watched_where_compiled_code_runs() -> None:
    """On a GPU no mode may be on: torch.compile would run regions uncompiled under it."""
    model = make_model()
    watcher = UnwatchedRecorder(model, torch.device("cpu"), None)
    with watcher.watching():
        assert not torch._C._len_torch_dispatch_stack()
        assert not torch._C._len_torch_function_stack()
        torch.ones(2).tolist()
    assert watcher.failure is None
    assert watcher.has_touched(torch.ones(2))
    assert len(watcher.describe([torch.ones(2)], None).nodes) == 0


def autocast_outside(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=True):
        hidden = model(x)
    loss: Tensor = hidden.float().square().mean()
    return loss


@pytest.mark.parametrize("microbatches", [1, 3])
def test_autocast_with_its_cache_replays_bit_for_bit(
    microbatches: int, device: torch.device
) -> None:
    check_against_eager(
        Case(make_model, batch, autocast_outside), device, microbatches=microbatches
    )


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_kernels_are_in_the_graph(whole: bool) -> None:
    """Warm-up compiles forward and backward; the capture must compile nothing more."""

    def make() -> nn.Module:
        model = make_model()
        if whole:
            model.compile()
        else:
            model[0].compile()
        return model

    device = torch.device("cuda")
    case = Case(make, batch, loss_fn)
    expected = run(case, "none", device)
    got = run(case, "full_iteration", device)
    assert_same_run(expected, got)
    assert got.report is not None
    assert got.report.num_captures == 1


@pytest.mark.gpu
def test_a_compiled_function_inside_loss_fn_is_found_during_the_capture() -> None:
    compiled = torch.compile(lambda out: out.square().mean())

    def compiled_loss(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = compiled(model(x))
        return loss

    device = torch.device("cuda")
    case = Case(make_model, batch, compiled_loss)
    assert_same_run(run(case, "none", device), run(case, "full_iteration", device))
