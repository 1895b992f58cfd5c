"""Parts of the GPU check: what a graph on CUDA must do beyond replaying, and offloaded state.

Each row is tried by itself; one that raises is told as its error. A CPU rehearses all of them but
those that only a GPU has. Not run on a GPU yet.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import graphfsdp
from benchmarks.timing import interleave
from benchmarks.workloads import TINY, Run, Workload, gpt
from graphfsdp.optim import CPUOffload, FusedAdam
from graphfsdp.training.gpt import GPT

NUM_STEPS = 8
Found = tuple[str, str, bool, dict[str, Any]]  # what, result, good, numbers
Test = Callable[[torch.device], tuple[str, bool, dict[str, Any]]]


def _train(
    device: torch.device, scope: str, prepare: Callable[[nn.Module], Any], **options: Any
) -> list[Tensor]:
    """Return the losses of some steps, and the weights at the end."""
    torch.manual_seed(0)
    config = replace(TINY.model, hidden_dropout=0.1, attention_dropout=0.1)
    model = GPT(config).to(device)
    loss_fn = prepare(model)
    generator = torch.Generator().manual_seed(1)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    with graphfsdp.capture(model, optimizer, scope=scope, loss_fn=loss_fn, **options) as step:
        found = []
        for _ in range(NUM_STEPS):
            tokens = torch.randint(256, (4, 32), generator=generator).to(device)
            found.append(step(tokens, tokens))
        return [*found, *(param.detach().clone() for param in model.parameters())]


def _compare(device: torch.device, prepare: Callable[[nn.Module], Any]) -> Any:
    expected = _train(device, "none", prepare)
    got = _train(device, "full_iteration", prepare)
    gap = max(
        (a.double() - b.double()).abs().max().item() for a, b in zip(expected, got, strict=True)
    )
    equal = all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    text = "equal bit for bit" if equal else f"differs by up to {gap:.3g}"
    return f"{text}, {NUM_STEPS} steps", equal, {"largest_difference": gap}


def autocast(device: torch.device) -> Any:
    """Compare replays with eager steps under autocast."""

    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = model(tokens, targets)
        return loss

    return _compare(device, lambda model: loss_fn)


def compiled(device: torch.device) -> Any:
    """Compare replays with eager steps of a model that torch.compile has compiled."""
    if device.type == "cpu":
        return "refused on a CPU by name", True, {}

    def prepare(model: nn.Module) -> None:
        model.compile()

    return _compare(device, prepare)


def drawing(device: torch.device) -> Any:
    """Write the driver's drawing, and count what the driver names."""
    with Run(TINY, "full_iteration", device) as run, tempfile.TemporaryDirectory() as folder:
        run.warm_up()
        report = run.step.report()
        report.html(Path(folder) / "report.html")
        counts = {kind: sum(names.values()) for kind, names in report.by_kind.items()}
        if device.type == "cpu":
            return f"{counts}", True, {"by_kind": counts}
        path = Path(folder) / "graph.dot"
        run.step.debug_dump(path)
        text = path.read_text()
        num_nodes = report.num_nodes
        modules = {name for name, seen in report.by_module.items() if seen}
    good = text.startswith("digraph") and num_nodes == sum(counts.values()) and len(modules) > 5
    result = f"DOT of {len(text)} bytes, {num_nodes} nodes, {counts}, {len(modules)} modules"
    return result, good, {"by_kind": counts, "num_nodes": num_nodes}


def launches(device: torch.device) -> Any:
    """Count what one replay launches, and whether it makes the host wait."""
    with Run(TINY, "full_iteration", device) as run:
        run.warm_up()
        if device.type == "cpu":
            return "nothing is launched on a CPU", True, {}
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            run()
            torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    graphs, kernels = counts.get("cudaGraphLaunch", 0), counts.get("cudaLaunchKernel", 0)
    text = f"{graphs} graph launch, {kernels} kernels beside it, no wait of the host"
    return text, graphs == 1 and kernels <= 10, {"graphs": graphs, "kernels": kernels}


def lengths(device: torch.device) -> Any:
    """Capture several lengths; their graphs are to share one pool."""
    torch.manual_seed(0)
    small = device.type == "cpu"
    longest = 32 if small else 256
    model = GPT(gpt(1, 32, 32) if small else gpt(4, 256, 256)).to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    reserved: list[int] = []
    with graphfsdp.capture(model, optimizer, on_change="recapture", warmup_steps=1) as step:
        for length in (longest, longest * 3 // 4, longest // 2, longest // 4):
            for _ in range(4):
                tokens = torch.randint(256, (8, length), device=device)
                step(tokens, tokens)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                reserved.append(torch.cuda.memory_reserved(device))
        report = step.report()
        num_captures = report.num_captures
    if not reserved:
        return f"{num_captures} captures", num_captures == 4, {}
    growth = (reserved[-1] - reserved[0]) / max(report.pool_bytes, 1)
    text = f"{num_captures} captures; after the longest, three more take {growth:.0%} of a pool"
    return text, num_captures == 4 and growth < 0.5, {"reserved_bytes": reserved}


def evaluation(device: torch.device) -> Any:
    """Train with and without evaluations in between."""
    losses = []
    for evaluates in (False, True):
        with Run(TINY, "full_iteration", device, dropout=0.1) as run:
            found = []
            for _ in range(NUM_STEPS):
                found.append(run())
                if evaluates:
                    tokens = torch.zeros(4, 32, dtype=torch.long, device=device)
                    run.step.evaluate(tokens, tokens)
            losses.append(torch.stack(found))
    equal = torch.equal(*losses)
    return "equal bit for bit" if equal else "other numbers", equal, {}


def broken(device: torch.device) -> Any:
    """Let the driver break a capture, and go on: draw, empty the cache, capture again."""
    if device.type == "cpu":
        return "no driver breaks a capture on a CPU", True, {}
    on = {"breaks": True}

    def loss_fn(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        if on["breaks"] and torch.cuda.is_current_stream_capturing():
            loss = loss + torch.tensor([1.0, 2.0], device=device).sum()
        return loss

    torch.manual_seed(0)
    model = GPT(TINY.model).to(device)
    tokens = torch.randint(256, (4, 32), device=device)
    with graphfsdp.capture(model, FusedAdam(model.parameters()), loss_fn=loss_fn) as step:
        text = "CUDA has captured it"
        for _ in range(4):
            try:
                step(tokens, tokens)
            except graphfsdp.CaptureError as error:
                text = f"CUDA error {error.cuda_error}"
        on["breaks"] = False
        torch.rand(3, device=device)
        torch.cuda.empty_cache()
        for _ in range(6):
            step(tokens, tokens)
        phase = step.phase.value
    return f"{text}, then {phase}", text == "CUDA error 900" and phase == "replay", {}


TESTS: dict[str, Test] = {
    "autocast to bfloat16": autocast,
    "torch.compile inside the graph": compiled,
    "DOT, nodes, report page": drawing,
    "one launch for each replay": launches,
    "four lengths, one pool": lengths,
    "evaluations in between": evaluation,
    "a capture that the driver breaks": broken,
}


def features(device: torch.device) -> Iterator[Found]:
    """Yield what was looked at, what was seen, whether it is right, and the numbers."""
    for what, test in TESTS.items():
        try:
            yield (what, *test(device))
        except Exception as error:  # whatever it is: the other rows have something to tell
            yield what, f"{type(error).__name__}: {error}", False, {}


def offload(workload: Workload, device: torch.device) -> Iterator[Found]:
    """Yield how long an offloaded step takes with and without overlap and pinned memory."""
    sets: dict[str, list[nn.Parameter]] = {}
    steps: dict[str, Callable[[], object]] = {}
    kinds = {
        "on the device": None,
        "offloaded": {"overlap_cpu_optimizer_d2h_h2d": False},
        "offloaded, pinned": {
            **{"overlap_cpu_optimizer_d2h_h2d": False},
            **{"pin_cpu_params": True, "pin_cpu_grads": True},
        },
        "offloaded, pinned, overlap": {"pin_cpu_params": True, "pin_cpu_grads": True},
    }
    for name, options in kinds.items():
        torch.manual_seed(0)
        params = [nn.Parameter(param) for param in GPT(workload.model).to(device).parameters()]
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(index)
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        optimizer: Any = FusedAdam(params, lr=1e-3)
        if options is not None:
            optimizer = CPUOffload(optimizer, **options)
        sets[name], steps[name] = params, optimizer.step
    for step in steps.values():  # makes the state, and pins memory
        step()
    seconds = interleave(steps, 3, 2, device)
    plain = statistics.median(seconds["offloaded"])
    for name, values in seconds.items():
        gaps = [(a - b).abs().max() for a, b in zip(sets["on the device"], sets[name], strict=True)]
        gap = torch.stack(gaps).max().item()
        median = statistics.median(values)
        text = f"{median * 1e3:.1f} ms, {plain / median:.2f} times as fast as offloaded, "
        text += f"largest difference {gap:.2g}"
        # Seven steps of 1e-3 each; a GPU rounds other than a CPU.
        good = gap <= 1e-5
        if name.endswith("overlap") and device.type == "cuda":
            good = good and plain / median >= 1.0
        yield f"{workload.name} optimizer step, {name}", text, good, {"step_ms": median * 1e3}
