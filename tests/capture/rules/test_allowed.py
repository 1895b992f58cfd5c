"""What looks forbidden or odd and is not: captured, and replays equal eager bit for bit."""

import pytest
import torch
from torch import Tensor

from catalogue import PROGRAMS
from catalogue_models import MODELS
from helpers import check_against_eager
from probe import Inner, assert_refused_in, check_captured, check_refused
from programs import ALLOWED, ALLOWED_ON_A_CPU, CONSTANT_READS

CPU = torch.device("cpu")
ONLY_ON_A_CPU = ALLOWED_ON_A_CPU | CONSTANT_READS


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


@pytest.mark.parametrize("name", ONLY_ON_A_CPU)
def test_what_a_cpu_graph_can_hold_is_captured(name: str) -> None:
    check_captured(ONLY_ON_A_CPU[name], CPU)


def test_a_constant_stops_being_one_when_it_is_written() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total += h.detach().mean(dim=0)
        return h * total[0].item()  # refused

    assert_refused_in(check_refused(program, CPU), program)


def test_a_view_of_a_constant_that_is_written_taints_all_of_it() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.zeros(4)
        total[2:].copy_(h.detach()[0, :2])
        return h * float(total[3])

    check_refused(program, CPU)


def test_a_literal_starts_anew_in_every_replay() -> None:
    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        total = torch.tensor([0.0, 1.0, 2.0, 3.0])
        total += h.detach().mean(dim=0)
        total[0] = 7.0
        return h * total

    check_captured(program, CPU)


CATALOGUE = PROGRAMS | MODELS


def test_no_program_is_lost() -> None:
    assert len(CATALOGUE) >= 26
    assert len(ALLOWED | ONLY_ON_A_CPU) >= 29


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it
def test_an_odd_program_replays_as_eager_runs(name: str) -> None:
    check_against_eager(CATALOGUE[name], CPU)


@pytest.mark.parametrize(
    ("name", "optimizer"), [("step_hooks", "sgd"), ("averaged_model", "adamw")]
)
def test_odd_setups_replay_with_optimizers_of_torch(name: str, optimizer: str) -> None:
    check_against_eager(CATALOGUE[name], CPU, optimizer=optimizer)
