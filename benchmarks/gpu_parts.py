"""The parts of the GPU check in processes of their own: parity with eager, the optimizer, more.

``python -m benchmarks.gpu_parts PART DEVICE [rehearse]`` runs one part and prints its rows as JSON.
Each part has a process of its own, since a CUDA error makes every later call in a process fail.
``rehearse`` takes the smallest model; a CPU then runs all of them, but what only a GPU has.
"""

import json
import os
import pathlib
import statistics
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.adam_table import bytes_per_param
from benchmarks.gpu_sharding import Row, make_deterministic, overlap, shape_of
from graphfsdp.bench.clock import interleave, time_window
from graphfsdp.bench.machine import profiled
from graphfsdp.optim import CPUOffload, FusedAdam
from graphfsdp.training.gpt import GPT, GPTConfig

SCOPES = ("none", "forward_backward", "full_iteration")
NUM_STEPS = 20
BATCH_SIZE = 4
LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1


TINY = shape_of("gpt-tiny")


# --- What a graph on CUDA must do: the numbers of eager, and more than replaying ---


def train(
    device: torch.device,
    scope: str,
    shape: GPTConfig = TINY,
    *,
    bf16: bool = False,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    evaluates: bool = False,
) -> dict[str, Tensor]:
    """``prepare`` may change the model, and returns the loss function."""
    torch.manual_seed(0)
    model = GPT(replace(shape, hidden_dropout=0.1, attention_dropout=0.1)).to(device)
    if bf16:
        for param in model.parameters():  # not the buffers: RoPE needs float32
            param.data = param.data.bfloat16()
    loss_fn = prepare(model)
    optimizer = FusedAdam(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, master_weights=bf16
    )
    generator = torch.Generator().manual_seed(1)
    size = (2, BATCH_SIZE, shape.seq_length)
    seen: dict[str, Tensor] = {}
    with graphfsdp.capture(
        model, optimizer, scope=scope, loss_fn=loss_fn, max_grad_norm=1.0
    ) as step:
        for index in range(NUM_STEPS):
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 - index / NUM_STEPS)
            batch = torch.randint(shape.vocab_size, size, generator=generator).to(device)
            seen[f"loss of step {index}"] = step(*batch)
            assert step.grad_norm is not None
            seen[f"gradient norm of step {index}"] = step.grad_norm.clone()
            if evaluates:
                step.evaluate(*torch.zeros_like(batch))
        for name, param in model.named_parameters():
            seen[f"parameter {name}"] = param.detach().clone()
    return seen


def first_difference(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str | None:
    """Name the first value that is not equal, and by how much; None if all are."""
    for name, value in expected.items():
        if not torch.equal(value, got[name]):
            gap = (value.double() - got[name].double()).abs().max().item()
            return f"{name} differs by {gap:.3g}"
    return None


def parity(names: Sequence[str], device: torch.device, *, bf16: bool) -> Iterator[Row]:
    """Compare every loss, gradient norm and final parameter with eager's, bit for bit."""
    for name in names:
        eager = train(device, "none", shape_of(name), bf16=bf16)
        for scope in SCOPES:
            other = "eager again" if scope == "none" else scope
            what = f"{name} {'bf16' if bf16 else 'fp32'}: {other} against eager, {NUM_STEPS} steps"
            yield Row(what, *_verdict(eager, train(device, scope, shape_of(name), bf16=bf16)))


def _verdict(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[str, bool]:
    difference = first_difference(expected, got)
    return difference or "equal bit for bit", difference is None


def _compare(device: torch.device, prepare: Callable[[nn.Module], Any]) -> tuple[str, bool]:
    eager = train(device, "none", prepare=prepare)
    return _verdict(eager, train(device, "full_iteration", prepare=prepare))


def autocast(device: torch.device) -> tuple[str, bool]:
    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        return loss

    return _compare(device, lambda model: loss_fn)


def compiled(device: torch.device) -> tuple[str, bool]:
    if device.type == "cpu":
        return "refused on a CPU by name", True
    return _compare(device, lambda model: model.compile())


def evaluation(device: torch.device) -> tuple[str, bool]:
    plain = train(device, "full_iteration")
    return _verdict(plain, train(device, "full_iteration", evaluates=True))


@contextmanager
def tiny_step(
    device: torch.device, shape: GPTConfig = TINY, **options: Any
) -> Iterator[tuple[graphfsdp.CapturedStep, Tensor]]:
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    tokens = torch.randint(256, (BATCH_SIZE, shape.seq_length), device=device)
    optimizer = FusedAdam(model.parameters(), lr=LR)
    with graphfsdp.capture(model, optimizer, **options) as step:
        yield step, tokens


def drawing(device: torch.device) -> tuple[str, bool]:
    """Write the driver's drawing, and count what the driver names."""
    with tiny_step(device) as (step, tokens), tempfile.TemporaryDirectory() as folder:
        for _ in range(6):
            step(tokens, tokens)
        report = step.report()
        report.html(pathlib.Path(folder) / "report.html")
        counts = {kind: sum(names.values()) for kind, names in report.by_kind.items()}
        if device.type == "cpu":
            return f"{counts}", True
        path = pathlib.Path(folder) / "graph.dot"
        step.debug_dump(path)
        text = path.read_text()
        modules = {name for name, seen in report.by_module.items() if seen}
    num_nodes = sum(counts.values())
    good = text.startswith("digraph") and report.num_nodes == num_nodes and len(modules) > 5
    return f"DOT of {len(text)} bytes, {counts}, {len(modules)} modules", good


def launches(device: torch.device) -> tuple[str, bool]:
    """Count what one replay launches, and whether it makes the host wait."""
    if device.type == "cpu":
        return "nothing is launched on a CPU", True
    with tiny_step(device) as (step, tokens):
        for _ in range(6):
            step(tokens, tokens)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # once it is on, torch says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            step(tokens, tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with profiled(device) as profile:
            step(tokens, tokens)
    counts = {event.key: event.count for event in profile.key_averages()}
    graphs, kernels = counts.get("cudaGraphLaunch", 0), counts.get("cudaLaunchKernel", 0)
    text = f"{graphs} graph launch, {kernels} kernels beside it, no wait of the host"
    return text, graphs == 1 and kernels <= 10


def lengths(device: torch.device) -> tuple[str, bool]:
    """Capture several lengths; their graphs are to share one pool."""
    shape = TINY if device.type == "cpu" else replace(TINY, seq_length=256, hidden_size=256)
    longest = shape.seq_length
    reserved: list[int] = []
    with tiny_step(device, shape, on_change="recapture", warmup_steps=1) as (step, tokens):
        for length in (longest, longest * 3 // 4, longest // 2, longest // 4):
            for _ in range(4):
                step(tokens[:, :length].contiguous(), tokens[:, :length].contiguous())
            if device.type == "cuda":
                torch.cuda.empty_cache()
                reserved.append(torch.cuda.memory_reserved(device))
        report = step.report()
    if not reserved:
        return f"{report.num_captures} captures", report.num_captures == 4
    growth = (reserved[-1] - reserved[0]) / max(report.pool_bytes, 1)
    text = f"{report.num_captures} captures; after the longest, three more take {growth:.0%} of "
    return f"{text}a pool", report.num_captures == 4 and growth < 0.5


def synchronize(tokens: Tensor) -> None:
    torch.cuda.current_stream().synchronize()  # torch would refuse a copy by itself


def read_a_number(tokens: Tensor) -> None:
    tokens.sum().item()


def fail(tokens: Tensor) -> None:
    raise KeyError("of the loss function")


# How a capture is broken, and the error that is to come out: the driver's number, or a name.
BREAKS: Mapping[str, tuple[Callable[[Tensor], None], str]] = {
    "the host waits": (synchronize, "900"),
    "a number is read": (read_a_number, "900"),
    "the loss function fails": (fail, "KeyError"),
}


def broken(device: torch.device) -> Iterator[Row]:
    """Let a capture break, and go on: draw, empty the cache, capture again."""
    for name, (break_it, expected) in BREAKS.items() if device.type == "cuda" else ():
        yield Row(f"a capture is broken: {name}", *_broken(device, break_it, expected))
    if device.type == "cpu":
        yield Row("a capture is broken", "no driver breaks a capture on a CPU")


def _broken(
    device: torch.device, break_it: Callable[[Tensor], None], expected: str
) -> tuple[str, bool]:
    breaks = True

    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        if breaks and torch.cuda.is_current_stream_capturing():
            break_it(tokens)
        return loss

    with tiny_step(device, loss_fn=loss_fn) as (step, tokens):
        said = "CUDA has captured it"
        for _ in range(4):
            try:
                step(tokens, tokens)
            except graphfsdp.CaptureError as error:
                said = f"{error.cuda_error}"
            except KeyError as error:
                said = type(error).__name__
        breaks = False
        torch.rand(3, device=device)
        torch.cuda.empty_cache()
        for _ in range(6):
            step(tokens, tokens)
        phase = step.phase.value
    return f"{said}, then {phase}", said == expected and phase == "replay"


FEATURES: Mapping[str, Callable[[torch.device], tuple[str, bool]]] = {
    "autocast to bfloat16": autocast,
    "DOT, nodes, report page": drawing,
    "one launch for each replay": launches,
    "four lengths, one pool": lengths,
    "evaluations in between": evaluation,
}


def features(
    device: torch.device, tests: Mapping[str, Callable[[torch.device], tuple[str, bool]]]
) -> Iterator[Row]:
    for what, test in tests.items():
        try:
            yield Row(what, *test(device))
        except Exception as error:  # whatever it is: the other rows have something to tell
            yield Row(what, f"{type(error).__name__}: {error}", ok=False)


# --- FusedAdam beside torch's: memory traffic per second, and offloaded state ---

TOLERANCE = 1e-5
# What is asked of FusedAdam on a GPU: of a copy's memory traffic, and of torch's speed.
LEAST_SHARE, LEAST_SPEEDUP = 0.9, 1.0
LARGEST_COPY_BYTES = 4 * 2**30


def parameters_of(shape: GPTConfig, device: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    with torch.device("meta"):
        sizes = [param.shape for param in GPT(shape).parameters()]
    generator = torch.Generator(device).manual_seed(0)

    def random(size: torch.Size) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    params = [nn.Parameter(random(size)) for size in sizes]
    for param in params:
        param.grad = random(param.shape)
    return params


def copy_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Return the traffic of a large copy, read and written bytes together: the ceiling."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    times = [time_window([lambda: target.copy_(source)] * 5, device).mean_ms for _ in range(6)]
    return 2e3 * num_bytes / statistics.median(times[1:])


def optimizers(shape: GPTConfig, device: torch.device, *rounds: int) -> Iterator[Row]:
    """Compare with torch's AdamW, called from Python, and on a GPU replayed from a CUDA graph."""
    ours, theirs = (parameters_of(shape, device, torch.float32) for _ in range(2))
    mixed = parameters_of(shape, device, torch.bfloat16)
    settings: dict[str, Any] = {"lr": 1e-4, "betas": BETAS, "weight_decay": WEIGHT_DECAY}
    fused = FusedAdam(ours, **settings)
    fused_mixed = FusedAdam(mixed, master_weights=True, **settings)
    capturable = device.type == "cuda"  # torch's own is capturable on accelerators only
    adamw = torch.optim.AdamW(theirs, fused=True, capturable=capturable, **settings)
    steps: dict[str, Callable[[], object]] = {
        "torch AdamW(fused=True), fp32": adamw.step,
        "FusedAdam, fp32": fused.step,
        "FusedAdam, bf16 with fp32 main weights": fused_mixed.step,
    }
    plain_bytes = bytes_per_param({}, torch.float32, torch.float32)
    mixed_bytes = bytes_per_param({"master_weights": True}, torch.bfloat16, torch.bfloat16)
    moved = dict(zip(steps, (plain_bytes, plain_bytes, mixed_bytes), strict=True))
    for step in steps.values():
        for _ in range(5):
            step()
    pairs = zip(ours, theirs, strict=True)
    gaps = [(one.detach() - two.detach()).abs().max() for one, two in pairs]
    gap = torch.stack(gaps).max().item()
    what = "FusedAdam against torch's AdamW, 5 steps"
    yield Row(what, f"largest difference {gap:.2g}", gap <= TOLERANCE)
    num_params = sum(param.numel() for param in ours)
    ceiling = copy_bytes_per_s(device, min(round(plain_bytes * num_params), LARGEST_COPY_BYTES))
    size = f"{num_params / 1e6:.1f}M parameters in {len(ours)} tensors"
    yield from speed_rows(steps, moved, num_params, size, ceiling, device, *rounds)
    if device.type == "cuda":
        replays = {name: _captured(step, device).replay for name, step in steps.items()}
        size += ", from a CUDA graph"
        yield from speed_rows(
            replays, moved, num_params, size, ceiling, device, *rounds, by_graph=True
        )


def _captured(step: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def speed_rows(
    steps: Mapping[str, Callable[[], object]],
    moved: Mapping[str, float],
    num_params: int,
    size: str,
    ceiling: float,
    device: torch.device,
    *rounds: int,
    by_graph: bool = False,
) -> Iterator[Row]:
    """Judge times beside those of the first contender; ``moved`` is bytes per parameter."""
    reference = next(iter(steps))
    num_rounds, num_steps = rounds
    windows = interleave(steps, num_rounds, num_steps, device)
    for name, own in windows.items():
        ms = statistics.median(window.mean_ms for window in own)
        rate = moved[name] * num_params / ms * 1e3
        text = f"{ms:.3f} ms, {moved[name]:g} bytes per parameter, {rate / 1e9:,.0f} GB/s "
        text += f"({rate / ceiling:.0%} of a copy)"
        good = True
        if name != reference:
            pairs = zip(windows[reference], own, strict=True)
            speedup = statistics.median(base.mean_ms / mine.mean_ms for base, mine in pairs)
            text += f"; {speedup:.3f} times as fast as torch's"
            if device.type == "cuda":
                # Torch has no main weights to keep; Python's share of a step is not the kernels'.
                good = speedup >= LEAST_SPEEDUP or "main weights" in name
                good = good and (rate >= LEAST_SHARE * ceiling or not by_graph)
        yield Row(f"{name}, {size}", text, good, {"ms": ms, "copy_bytes_per_s": ceiling})


def offload(name: str, device: torch.device) -> Iterator[Row]:
    pinned = {"pin_cpu_params": True, "pin_cpu_grads": True}
    kinds: dict[str, dict[str, bool] | None] = {
        "on the device": None,
        "offloaded": {"overlap_cpu_optimizer_d2h_h2d": False},
        "offloaded, pinned": {"overlap_cpu_optimizer_d2h_h2d": False, **pinned},
        "offloaded, pinned, overlap": pinned,
    }
    sets: dict[str, list[nn.Parameter]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for kind, options in kinds.items():
        sets[kind] = parameters_of(shape_of(name), device, torch.float32)
        optimizer: Any = FusedAdam(sets[kind], lr=LR)
        if options is not None:
            optimizer = CPUOffload(optimizer, **options)
        steps[kind] = optimizer.step
        optimizer.step()  # makes the state, and pins memory
    windows = interleave(steps, 3, 2, device)
    times = {kind: statistics.median(one.mean_ms for one in own) for kind, own in windows.items()}
    for kind, ms in times.items():
        gaps = [(a - b).abs().max() for a, b in zip(sets["on the device"], sets[kind], strict=True)]
        gap, speedup = torch.stack(gaps).max().item(), times["offloaded"] / ms
        text = f"{ms:.1f} ms, {speedup:.2f} times as fast as offloaded, "
        # Seven steps of 1e-3 each; a GPU rounds other than a CPU.
        good = gap <= TOLERANCE
        if kind.endswith("overlap") and device.type == "cuda":
            good = good and speedup >= 1.0
        text += f"largest difference {gap:.2g}"
        yield Row(f"{name} optimizer step, {kind}", text, good, {"ms": ms})


def run_part(name: str, device: torch.device, *, rehearses: bool) -> Iterator[Row]:
    """``rehearses``: on the smallest model."""
    small = ("gpt-tiny",) if rehearses else ("gpt-tiny", "llama-tiny", "gpt-11m")
    large = "gpt-tiny" if rehearses else "gpt2-124m"
    largest = TINY if rehearses else replace(shape_of("gpt2-355m"), hidden_size=1792)
    often, seldom = ((2, 1), (2, 1)) if rehearses else ((20, 10), (8, 5))
    table: Mapping[str, Callable[[], Iterable[Row]]] = {
        "parity-fp32": lambda: parity(small, device, bf16=False),
        "parity-bf16": lambda: parity(small, device, bf16=True),
        "optimizer": lambda: optimizers(shape_of(large), device, *often),
        "optimizer-1b": lambda: optimizers(largest, device, *seldom),
        "features": lambda: features(device, FEATURES),
        "broken": lambda: broken(device),
        "compile": lambda: features(device, {"torch.compile inside the graph": compiled}),
        "offload": lambda: offload(large, device),
        "overlap": lambda: overlap(large, device),
    }
    yield from table[name]()


def main() -> None:
    """Run one part; the last line of the output is the result."""
    name, device, rehearses = sys.argv[1], torch.device(sys.argv[2]), "rehearse" in sys.argv[3:]
    if device.type == "cpu":
        torch.set_num_threads(1)
    if name.startswith(("parity", "features", "overlap", "compile", "broken")):
        # Read at the first matrix product; child processes inherit it.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        make_deterministic()
    rows: list[dict[str, object]] = []
    error = None
    try:
        for row in run_part(name, device, rehearses=rehearses):
            rows.append(asdict(row))
            # The last line that was printed counts, also if the process is killed meanwhile.
            print(json.dumps({"rows": rows, "error": "it did not end"}), flush=True)
    except Exception:
        error = traceback.format_exc()
    print(json.dumps({"rows": rows, "error": error}))


if __name__ == "__main__":
    main()
