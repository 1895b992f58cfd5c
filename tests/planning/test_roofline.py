"""What `graphfsdp plan --device` says that an iteration takes at least."""

import pytest
import torch

from graphfsdp.planning import roofline
from graphfsdp.planning.plan import TrainingPlan, plan_training
from graphfsdp.training.arguments import parse_train_arguments
from graphfsdp.training.metrics import peak_tflops

H100, B200 = roofline.DEVICES["h100"], roofline.DEVICES["b200"]
BF16 = torch.bfloat16


def test_a_kernel_takes_as_long_as_its_arithmetic_or_its_bytes() -> None:
    flops, num_bytes = 989e12, 3.35e12  # a second of either on an H100
    gap = roofline.NODE_S
    assert roofline.kernel_s(flops, 0, BF16, H100) == pytest.approx(1 + gap)
    assert roofline.kernel_s(0, 2 * num_bytes, BF16, H100) == pytest.approx(2 + gap)
    assert roofline.kernel_s(flops, num_bytes / 2, BF16, H100) == pytest.approx(1 + gap)
    assert roofline.kernel_s(0, 8e12, BF16, B200) == pytest.approx(1 + gap)


def test_float32_is_slower_than_bfloat16() -> None:
    narrow = roofline.arithmetic_s(67e12, BF16, H100)
    assert roofline.arithmetic_s(67e12, torch.float32, H100) == pytest.approx(narrow * 989 / 67)


@pytest.mark.parametrize("name", roofline.DEVICES)
def test_each_device_has_a_peak(name: roofline.DeviceName) -> None:
    assert peak_tflops(roofline.DEVICES[name].name, BF16) is not None


def test_a_captured_iteration_is_bound_by_the_gpu_alone() -> None:
    found = roofline.bound(
        H100, BF16, flops=0, num_bytes=0, wire_bytes=450e9, num_kernels=1_000, num_calls=10**6
    )
    assert found.links == 1.0
    assert found.arithmetic == found.memory == pytest.approx(500e-6)
    assert found.host == max(found) == pytest.approx(3.8)
    assert found.captured == 1.0
    assert found._replace(arithmetic=0, memory=0, links=0).captured == roofline.CALL_S


def plan(line: str, num_ranks: int = 1) -> TrainingPlan:
    return plan_training(parse_train_arguments(line.split()), num_ranks=num_ranks)


def test_a_plan_is_bound_by_what_it_counts() -> None:
    one = plan("--preset tiny --bf16")
    found = one.bound(H100)
    gaps = one.num_kernels * roofline.NODE_S
    assert found.arithmetic == pytest.approx(one.flops / 989e12 + gaps)
    assert found.memory == pytest.approx(2 * one.total_bytes / 3.35e12 + gaps)
    assert found.host == pytest.approx(one.num_kernels * roofline.CALL_S)
    assert found.links == 0
    assert plan("--preset tiny --bf16 --data-parallel-sharding-strategy 3", 2).bound(H100).links > 0
    assert one.bound(B200).memory < found.memory


def test_micro_batches_and_layers_have_kernels_of_their_own() -> None:
    line = "--preset tiny --global-batch-size {} --micro-batch-size 1 --num-layers {}"
    one, four = plan(line.format(1, 2)), plan(line.format(4, 2))
    assert four.num_kernels >= 4 * one.num_kernels
    assert four.bound(H100).memory > one.bound(H100).memory
    deeper, deepest = plan(line.format(1, 3)), plan(line.format(1, 4))
    of_a_layer = deeper.num_kernels - one.num_kernels
    assert of_a_layer == deepest.num_kernels - deeper.num_kernels > 10
