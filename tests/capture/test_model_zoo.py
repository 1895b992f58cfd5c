"""Many kinds of models, captured: every number equals eager's bit for bit."""

import itertools
from typing import Any

import pytest
import torch

from cpu_recording import poisoned
from helpers import check_against_eager
from zoo import ZOO


@pytest.mark.parametrize("name", ZOO)
def test_replay_equals_the_plain_loop_and_nothing_is_warned_of(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    check_against_eager(ZOO[name], device, beside="plain")
    assert "stands still" not in caplog.text


@pytest.mark.parametrize("name", ["mlp", "channels_last", "gpt", "odd_shapes", "unused_parameter"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_replay_with_optimizers_of_torch_equals_eager(
    name: str, optimizer: str, device: torch.device
) -> None:
    check_against_eager(ZOO[name], device, optimizer=optimizer)


@pytest.mark.parametrize(
    ("name", "scope", "optimizer", "microbatches"),
    [
        (name, scope, *(("fused_adam", 2), ("adamw", 3))[index // 2 % 2])
        for (index, name), scope in zip(
            enumerate(ZOO), itertools.cycle(("full_iteration", "forward_backward"))
        )
    ],
)
def test_clipped_microbatches_equal_eager_and_nothing_reads_memory_after_its_planned_life(
    name: str, scope: str, optimizer: str, microbatches: int, device: torch.device
) -> None:
    options: dict[str, Any] = {"microbatches": microbatches, "max_grad_norm": 0.05}
    with poisoned():
        check_against_eager(ZOO[name], device, scope=scope, optimizer=optimizer, **options)
