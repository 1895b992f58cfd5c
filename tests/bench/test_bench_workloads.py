import pytest
import torch
from torch import Tensor

from graphfsdp.bench.contenders import Setting, initial_model, learning_rate, own_contender
from graphfsdp.bench.workloads import (
    BatchSource,
    Case,
    DtypeName,
    batch_source,
    workloads,
)
from graphfsdp.config import Scope
from graphfsdp.training.ranks import Ranks

TINY = ("gpt-tiny", "llama-tiny", "zoo-encoder", "zoo-conv")
NUM_STEPS = 14


def source_of(
    name: str, device: torch.device, *, dtype: DtypeName = "fp32", ranks: Ranks | None = None
) -> tuple[Setting, BatchSource]:
    setting = Setting(Case(name, dtype, 2), device, ranks=ranks or Ranks())
    return setting, batch_source(setting.case, device, setting.ranks)


def losses_of(name: str, dtype: DtypeName, scope: Scope, device: torch.device) -> Tensor:
    setting, source = source_of(name, device, dtype=dtype)
    contender = own_contender(setting, scope)
    try:
        batches = source.take(0, NUM_STEPS)
        losses = [contender(batch, step) for step, batch in enumerate(batches)]
        assert contender.optimizer.param_groups[0]["lr"] == learning_rate(NUM_STEPS - 1)
        return torch.stack(losses)
    finally:
        contender.close()


# The twelve architectures are in tests/capture/test_model_zoo.py.
@pytest.mark.parametrize("name", TINY[:2])
def test_every_kind_of_workload_replays_bit_for_bit(name: str, device: torch.device) -> None:
    dtype: DtypeName = "bf16" if name == "llama-tiny" else "fp32"
    eager = losses_of(name, dtype, Scope.NONE, device)
    assert eager.isfinite().all()
    assert eager.unique().numel() == NUM_STEPS
    assert torch.equal(losses_of(name, dtype, Scope.FULL_ITERATION, device), eager)


@pytest.mark.parametrize("name", TINY)
def test_batches_depend_on_step_and_ranks_alone(name: str, device: torch.device) -> None:
    _, source = source_of(name, device, ranks=Ranks(rank=0, size=2))
    _, other_rank = source_of(name, device, ranks=Ranks(rank=1, size=2))
    first, second = source.take(5, 2)
    (again,) = source.take(5, 1)
    (elsewhere,) = other_rank.take(5, 1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], elsewhere[0])
    assert all(tensor.device.type == device.type for tensor in first)


def test_names_say_how_large_the_models_are() -> None:
    for workload in workloads():
        size = workload.name.rpartition("-")[2]
        if size[-1] in "mb" and size[:-1].isdigit():
            millions = float(size[:-1]) * (1000 if size[-1] == "b" else 1)
            with torch.device("meta"):
                params = workload.make().parameters()
            counted = sum(param.numel() for param in params) / 1e6
            # A round name; Llama 1b is 1.26 billion with its vocabulary of 32,000 twice.
            assert counted == pytest.approx(millions, rel=0.3), workload.name


def test_weights_of_a_bf16_case_begin_with_values_that_bf16_has() -> None:
    model = initial_model(Setting(Case("gpt-tiny", "bf16", 1), torch.device("cpu")))
    for param in model.parameters():
        assert param.dtype == torch.float32
        assert torch.equal(param, param.bfloat16().float())
