"""torch.compile of modules that are units, before or after ``fully_shard``."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ranks import on_ranks
from sharding_helpers import (
    Net,
    Training,
    adam,
    assert_same_training,
    make_net,
    replayed_as_eager,
    shard,
    train,
)
from stand_in_compilers import compiling_models_by


def trained(model: nn.Module) -> Training:
    with warnings.catch_warnings():
        # torch.compile hides its own, which does not help where warnings are errors.
        warnings.simplefilter("ignore")
        return train(model, adam(model), scope="none", num_steps=4)


# torch 2.15 traces hooks of modules, ends at those of a unit, and compiles its forward in pieces.
ONE_GRAPH = torch.torch_version.TorchVersion(torch.__version__) < "2.15"


class Tracer:
    """Runs what torch.compile has traced as it is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of each graph, in operators

    def __call__(self, traced: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        calls = ("call_function", "call_method", "call_module")
        self.sizes.append(sum(node.op in calls for node in traced.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(traced, example)


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def compiled_net(strategy: str, when: str, backend: Any, *, recompute: bool = False) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a GPU it imports Inductor, of which torch warns
        torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    if recompute:
        model.blocks = nn.ModuleList(Recomputed(block) for block in model.blocks)
    if when == "before":
        for block in model.blocks:
            block.compile(backend=backend)
    shard(model, strategy)
    if when == "after":
        for block in model.blocks:
            block.compile(backend=backend)
    if when == "the model":
        model.compile(backend=backend)
    return model


@pytest.mark.parametrize(
    ("strategy", "when", "recompute"),
    [
        ("optim", "after", False),
        ("optim_grads_params", "before", False),
        ("optim_grads_params", "the model", False),
        ("optim_grads_params", "before", True),
    ],
)
@on_ranks("ranks2")
def test_compiled_units_train_as_eager_ones_do(strategy: str, when: str, recompute: bool) -> None:
    """A unit's own forward is one graph, whatever gathers and frees its weights around it."""
    tracer = Tracer()
    expected, got = (
        trained(compiled_net(strategy, each, tracer, recompute=recompute))
        for each in ("never", when)
    )
    assert_same_training(expected, got)
    if ONE_GRAPH and not recompute:
        assert [size for size in tracer.sizes if size > 3] == [6, 5], tracer.sizes


@pytest.mark.gpu
@on_ranks("gpu_ranks")
def test_a_captured_step_compiles_units_and_gathers_around_them() -> None:
    tracer = Tracer()
    with compiling_models_by(tracer), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        for strategy in ("optim", "optim_grads_params"):
            replayed_as_eager(lambda: make_net(strategy, dropout=0.2), compile=True)  # noqa: B023
    if ONE_GRAPH:
        assert [size for size in tracer.sizes if size > 3] == [6, 5] * 2
