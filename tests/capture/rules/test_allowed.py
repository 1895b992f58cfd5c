"""What looks forbidden or odd and is not: captured, and replays equal eager bit for bit."""

import pytest
import torch

from allowed_programs import ALLOWED, ALLOWED_ON_A_CPU, CONSTANT_READS
from catalogue import CATALOGUE
from helpers import check_against_eager
from mid_forward import check_captured

CPU = torch.device("cpu")
ONLY_ON_A_CPU = ALLOWED_ON_A_CPU | CONSTANT_READS


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_graph_can_hold_is_captured(name: str, device: torch.device) -> None:
    check_captured(ALLOWED[name], device)


@pytest.mark.parametrize("name", ONLY_ON_A_CPU)
def test_what_a_cpu_graph_can_hold_is_captured(name: str) -> None:
    check_captured(ONLY_ON_A_CPU[name], CPU)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp uses it
def test_an_odd_program_replays_as_eager_runs(name: str) -> None:
    check_against_eager(CATALOGUE[name], CPU)


@pytest.mark.parametrize(
    ("name", "optimizer"), [("step_hooks", "sgd"), ("averaged_model", "adamw")]
)
def test_odd_setups_replay_with_optimizers_of_torch(name: str, optimizer: str) -> None:
    check_against_eager(CATALOGUE[name], CPU, optimizer=optimizer)
