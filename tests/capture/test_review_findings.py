"""Programs that were once captured silently wrong, refused without need, or reported badly."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, check_against_eager
from mid_forward import Inner, batches, check_captured, make_probe, refusal_of

CPU = torch.device("cpu")


def test_an_own_operator_that_draws_random_numbers_is_undone() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        noise: Tensor = torch.ops.graphfsdp_review.noise(x)
        return h * noise * noise.sum().item()

    step, model, optim = make_probe(program, CPU)
    model.dropout.p = 0.0  # the operator's draw is the first of the iteration
    refusal_of(step, model, optim, CPU)


@torch.library.custom_op("graphfsdp_review::noise", mutates_args=())
def _noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


@_noise.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_numpy_cannot_write_a_constant_behind_the_recording() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        shift = torch.zeros(4)
        if writes:
            shift.numpy()[:] = 3.0
        return h * float(np.sqrt(torch.full((4,), 2.0).numpy()).sum()) + shift

    writes = False
    check_captured(program, CPU)
    step, *_ = make_probe(program, CPU)
    for x in batches(CPU, 3):
        step(x)
    writes = True
    with pytest.raises(ValueError, match="read-only"):
        step(batches(CPU, 1)[0])


def ctc_loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    scores = model(x).log_softmax(dim=-1)
    as_numbers = torch.ctc_loss(scores, targets, (12, 12), (4, 4), reduction=1)
    as_tensors = functional.ctc_loss(scores, targets, torch.full((2,), 12), torch.full((2,), 3))
    return as_numbers + as_tensors


class PackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([12, 7]))
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])
        loss: Tensor = output.square().mean() + packed.data.mean()
        return loss


@pytest.mark.parametrize("kind", ["ctc", "packed"])
def test_lengths_that_never_change_need_no_host_read(kind: str) -> None:
    def batch(generator: torch.Generator) -> Batch:
        x = torch.randn(12, 2, 6, generator=generator)
        return Batch((x, torch.randint(1, 5, (2, 4), generator=generator)))

    if kind == "ctc":
        case = Case(lambda: nn.Linear(6, 5), batch, ctc_loss)
    else:
        case = Case(PackedLSTM, batch)
    check_against_eager(case, CPU)


class BatchOfTensors(UserDict[str, Tensor]):
    """A mapping that torch's pytrees do not know, as tokenizers return it."""


@dataclass
class Options:
    power: int


def leaf_loss(model: nn.Module, x: Tensor, leaf: Any) -> Tensor:
    power = leaf.power if isinstance(leaf, Options) else 2
    loss: Tensor = model(x).pow(power).mean()
    return loss


def step_with_leaves() -> graphfsdp.CapturedStep:
    model = nn.Linear(4, 1)
    return graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=leaf_loss)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (BatchOfTensors(x=torch.ones(2)), r"args\[1\] is a BatchOfTensors, whose tensors"),
        (np.ones(3), r"args\[1\] is a numpy array.*torch\.from_numpy"),
    ],
)
def test_leaves_that_hide_values_are_refused(leaf: Any, message: str) -> None:
    with pytest.raises(graphfsdp.ConfigError, match=message):
        step_with_leaves()(torch.ones(2, 4), leaf)


def test_a_plain_value_that_changes_in_place_is_another_value() -> None:
    step, options = step_with_leaves(), Options(power=2)
    for _ in range(6):
        step(torch.ones(2, 4), options)
    step(torch.ones(2, 4), Options(power=2))
    options.power = 4
    with pytest.raises(graphfsdp.BatchMismatchError, match=r"power=2.*power=4"):
        step(torch.ones(2, 4), options)


def test_a_module_may_be_an_argument() -> None:
    step, teacher = step_with_leaves(), nn.Linear(4, 1)
    for _ in range(6):
        step(torch.ones(2, 4), teacher)
