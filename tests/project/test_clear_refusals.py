"""Mistakes of users that were once met with silence, or with an error of somebody else's."""

import pathlib

import pytest
import torch
from torch import Tensor, nn

import forked_programs
import graphfsdp
from graphfsdp.optim import FusedAdam


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(graphfsdp.ConfigError, match="holds none of the model's 2 trainable"):
        graphfsdp.capture(model, FusedAdam(other.parameters()))
    graphfsdp.capture(model, FusedAdam([model.bias])).close()  # a part of them will do


def test_a_lazy_module_is_refused_by_the_name_of_its_parameter() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(graphfsdp.ConfigError, match=r"'0\.weight'.*no shape yet.*run the model"):
        graphfsdp.capture(model, optimizer)


@pytest.mark.parametrize("iteration", [False, True])
def test_a_host_read_of_an_optimizer_comes_with_the_remedies_for_optimizers(
    iteration: bool,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adafactor(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = graphfsdp.capture(
        model,
        optimizer,
        loss_fn=lambda model, x: model(x).square().mean(),
        iteration=train if iteration else None,
    )
    for _ in range(3):
        step(torch.ones(2, 2))
    with pytest.raises(graphfsdp.CaptureError, match=r"^Adafactor\.step: .*'forward_backward'"):
        step(torch.ones(2, 2))


def test_clipping_of_a_list_of_parameters_is_refused_by_name() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(graphfsdp.ConfigError, match=r"got list.*clip_grad_norm_\(model"):
        graphfsdp.clip_grad_norm_(list(model.parameters()), 1.0)  # type: ignore[arg-type]


DESTROYED = """
import sys, torch, graphfsdp
import torch.distributed as dist
from torch import nn
from graphfsdp.optim import FusedAdam

dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
model = nn.Linear(4, 1)
graphfsdp.fully_shard(model)
step = graphfsdp.capture(
    model, FusedAdam(model.parameters()), loss_fn=lambda model, x: model(x).sum(), warmup_steps=1
)
step(torch.ones(2, 4))
if sys.argv[2] == "replays":
    step(torch.ones(2, 4))
dist.destroy_process_group()
try:
    step(torch.ones(2, 4))
except graphfsdp.PhaseError as error:
    print(error)
step.close()
"""


@pytest.mark.parametrize("phase", ["captures", "replays"])
def test_a_call_after_the_process_group_is_refused(phase: str, tmp_path: pathlib.Path) -> None:
    ended = forked_programs.run_source(DESTROYED, f"file://{tmp_path}/store", phase)
    assert ended.returncode == 0, ended.stderr
    assert "after destroy_process_group" in ended.stdout
    assert "Remedy: step.close() first" in ended.stdout
