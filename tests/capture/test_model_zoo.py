"""Many kinds of models, captured: every number equals eager's bit for bit.

Also where torch's default device is another: what the product makes for itself lies where it says.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphfsdp
from cpu_recording import poisoned
from graphfsdp.optim import FusedAdam, Muon
from helpers import check_against_eager
from stand_in_compilers import compiling_by
from zoo import ZOO

# Torch's own optimizers fail then where the default device is "meta", in plain loops too.
COUNTS_ELSEWHERE = torch.torch_version.TorchVersion(torch.__version__) < "2.13"


@pytest.mark.parametrize("name", ZOO)
def test_replay_equals_the_plain_loop_and_nothing_is_warned_of(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    check_against_eager(ZOO[name], device, beside="plain")
    assert "stands still" not in caplog.text


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


@contextmanager
def _default(device: torch.device | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)  # a device by name is a mode, and would stay on


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda params: FusedAdam(params), {"max_grad_norm": 1.0, "skip_nonfinite": True}),
        (lambda params: FusedAdam(params, bias_correction=False), {"microbatches": 2}),
        (lambda params: Muon([{"params": params}], lr=0.1), {"evaluates": True}),
        (torch.optim.AdamW, {"max_grad_norm": 1.0}),
        (torch.optim.AdamW, {"compile": True}),
    ],
    ids=["adam", "no correction", "muon", "torch", "compiled"],
)
def test_a_default_device_changes_no_bit(
    device: torch.device,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    if COUNTS_ELSEWHERE and device.type == "cpu" and make is torch.optim.AdamW:
        pytest.skip("its step counts would be on the default device, and hold no numbers")
    options = dict(options)
    evaluates = options.pop("evaluates", False)
    options["compile"] = "compile" in options and device.type == "cpu"

    def trained(default: torch.device | None, folder: Path) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        model, optimizer = model.to(device), make([*model.to(device).parameters()])
        batches = [torch.randn(4, 4).to(device) for _ in range(7)]
        with (
            compiling_by(),
            _default(default),
            graphfsdp.capture(
                model, optimizer, loss_fn=lambda model, x: model(x).square().mean(), **options
            ) as step,
        ):
            seen = [step(batch) for batch in batches]
            if evaluates:
                seen.append(step.evaluate(batches[0]))
            graphfsdp.save(folder, model, optimizer)
            graphfsdp.load(folder, model, optimizer)
            seen.append(step(batches[0]))
            assert step.phase.value == "replay"
            assert not any("else" in line for line in step.report().compiled)
        return [*seen, *(param.detach() for param in model.parameters())]

    expected = trained(None, tmp_path / "expected")
    # On a GPU the habit; on a CPU what holds no numbers, so that whatever lies there is seen.
    elsewhere = device if device.type == "cuda" else torch.device("meta")
    got = trained(elsewhere, tmp_path / "got")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
