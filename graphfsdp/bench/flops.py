"""How much matrix arithmetic a model needs, and how much the machine can do."""

import time

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphfsdp.bench.batches import Batch
from graphfsdp.bench.facts import PeakFacts
from graphfsdp.bench.workloads import Case, make_model
from graphfsdp.training.gpt import GPT
from graphfsdp.training.metrics import flops_per_token, peak_tflops

PALM_FORMULA = "6 N + 12 L C T per token (PaLM, appendix B)"
COUNTED = "3 x the matrix products and convolutions of a forward pass, counted"
_CPU_SIZE, _GPU_SIZE = 1024, 8192
_NUM_PRODUCTS = 5


def model_flops(case: Case, batch: Batch) -> tuple[float, str]:
    """Return the FLOPs of one step of a case, and how they were found; nothing is computed.

    Recomputation, the optimizer and everything that is no matrix product or convolution do not
    count.
    """
    with torch.device("meta"):
        model = make_model(case.workload.model)
    if isinstance(model, GPT):
        num_tokens = case.batch_size * case.workload.items_per_sample
        return float(flops_per_token(model) * num_tokens), PALM_FORMULA
    return 3.0 * forward_flops(model, batch), COUNTED


def forward_flops(model: nn.Module, batch: Batch) -> int:
    """Return the FLOPs of one forward pass of a model on the meta device."""
    shapes: list[Tensor] = [tensor.to("meta") for tensor in batch]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*shapes)
    return int(counter.get_total_flops())


def num_parameters(case: Case) -> int:
    """Return how many trainable numbers the model of a case has."""
    with torch.device("meta"):
        model = make_model(case.workload.model)
    return sum(param.numel() for param in model.parameters())


def find_peak(device: torch.device, dtype: torch.dtype) -> PeakFacts:
    """Measure the best of some products of large random matrices, and look up the data sheet's."""
    on_gpu = device.type == "cuda"
    size = _GPU_SIZE if on_gpu else _CPU_SIZE
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in "ab")
    seconds = []
    for _ in range(_NUM_PRODUCTS + 1):  # the first one finds a kernel
        start = time.perf_counter()
        left @ right
        if on_gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    threads = "" if on_gpu else f" on {torch.get_num_threads()} thread(s)"
    return PeakFacts(
        stated_tflops=peak_tflops(name, dtype) if on_gpu else None,
        measured_tflops=2 * size**3 / min(seconds[1:]) / 1e12,
        measured_how=f"the best of {_NUM_PRODUCTS} products of random {size} x {size} matrices in "
        f"{str(dtype).removeprefix('torch.')}{threads}",
    )
