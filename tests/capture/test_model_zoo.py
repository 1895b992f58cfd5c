"""Many kinds of models, captured: every number equals eager's bit for bit."""

from itertools import pairwise

import pytest
import torch

from helpers import check_against_eager, run
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_replay_equals_eager(name: str, device: torch.device) -> None:
    check_against_eager(ZOO[name], device)


@pytest.mark.parametrize("name", ["mlp", "channels_last", "gpt", "odd_shapes", "unused_parameter"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_replay_with_optimizers_of_torch_equals_eager(
    name: str, optimizer: str, device: torch.device
) -> None:
    check_against_eager(ZOO[name], device, optimizer=optimizer)


@pytest.mark.parametrize(
    ("name", "optimizer", "microbatches"),
    [(name, *(("fused_adam", 2), ("adamw", 3))[index % 2]) for index, name in enumerate(ZOO)],
)
def test_replay_of_clipped_microbatches_equals_eager(
    name: str, optimizer: str, microbatches: int, device: torch.device
) -> None:
    check_against_eager(
        ZOO[name], device, optimizer=optimizer, microbatches=microbatches, max_grad_norm=0.05
    )


@pytest.mark.parametrize("name", ZOO)
def test_replay_of_forward_and_backward_alone_equals_eager(name: str, device: torch.device) -> None:
    check_against_eager(
        ZOO[name], device, scope="forward_backward", microbatches=2, max_grad_norm=0.05
    )


@pytest.mark.parametrize("name", ["mlp", "gpt", "encoder_layer"])
def test_dropout_draws_anew_in_every_replay(name: str, device: torch.device) -> None:
    """With everything else fixed, losses differ only by what dropout draws."""
    case = ZOO[name]
    fixed = case.batch(torch.Generator().manual_seed(7))
    frozen = type(case)(case.make, lambda generator: fixed, case.loss_fn)
    trace = run(frozen, "full_iteration", device, optimizer="sgd", num_steps=10)
    kept = [state["generator of the cpu"] for state in trace.snapshots]
    assert len({float(outputs[0]) for outputs in trace.outputs}) == 10
    if device.type == "cpu":
        assert not any(torch.equal(a, b) for a, b in pairwise(kept))
