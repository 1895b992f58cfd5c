"""Single questions of speed on the CPU, in pairs that take turns: optimizer, checkpoints, guards.

``python -m benchmarks.pairs adam`` puts FusedAdam beside torch's AdamW(fused=True) on GPT-2-124M's
tensors: plain float32, and bfloat16 weights with float32 main weights beside the usual loop over
float32 copies. The time is the processor's, all threads together.

``python -m benchmarks.pairs checkpoint`` saves and loads a GPT and its Adam states beside plain
torch.distributed.checkpoint; both sync what they write. The time is the clock's.

``python -m benchmarks.pairs guards`` asks which share of a replay its guards take, for twelve small
architectures.

All print their findings and write a file in results.
"""

import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import graphfsdp
from graphfsdp.bench.batches import batch_source
from graphfsdp.bench.clock import interleave
from graphfsdp.bench.contenders import OwnContender, Setting
from graphfsdp.bench.machine import find_environment
from graphfsdp.bench.measure import NUM_WARMUP_STEPS
from graphfsdp.bench.records import Spread
from graphfsdp.bench.workloads import Case, suite
from graphfsdp.config import Scope
from graphfsdp.optim import FusedAdam
from graphfsdp.training.arguments import find_preset
from graphfsdp.training.gpt import GPT, GPTConfig

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

Step = Callable[[], object]
Record = dict[str, Any]


def record(times_ms: Mapping[str, Sequence[float]], reference: str, own: str) -> Record:
    pairs = zip(times_ms[reference], times_ms[own], strict=True)
    return {
        "ms": {name: statistics.median(values) for name, values in times_ms.items()},
        "speedup": asdict(Spread.of([base / mine for base, mine in pairs])),
        "ms_by_round": dict(times_ms),
    }


def sizes_of(shape: GPTConfig) -> list[torch.Size]:
    with torch.device("meta"):
        return [param.shape for param in GPT(shape).parameters()]


def parameters_of(
    sizes: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> list[nn.Parameter]:
    """With gradients; the same in each call."""
    generator = torch.Generator(device).manual_seed(0)

    def random(size: Sequence[int]) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    params = [nn.Parameter(random(size)) for size in sizes]
    for param in params:
        param.grad = random(param.shape)
    return params


def torch_step(params: list[nn.Parameter]) -> Step:
    """Of bfloat16 parameters the usual step over float32 copies."""
    if params[0].dtype == torch.float32:
        return torch.optim.AdamW(params, fused=True, **SETTINGS).step
    copies = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(copies, fused=True, **SETTINGS)

    @torch.no_grad()
    def step() -> None:
        for copy, param in zip(copies, params, strict=True):
            assert param.grad is not None, "parameters_of sets it"
            copy.grad = param.grad.float()
        optimizer.step()
        for copy, param in zip(copies, params, strict=True):
            param.copy_(copy)

    return step


def adam(shapes: Sequence[Sequence[int]], num_rounds: int = 5, num_placements: int = 6) -> Record:
    """Where the pages lie changes the time of one and the same optimizer by up to a tenth.

    So both are made anew several times, in alternating order.
    """
    found: Record = {}
    for name, dtype in (("fp32", torch.float32), ("bf16, fp32 main weights", torch.bfloat16)):
        cpu_ms: dict[str, list[float]] = {"torch": [], "FusedAdam": []}
        for placement in range(num_placements):
            sets = [parameters_of(shapes, CPU, dtype) for _ in range(2)]
            mine, others = sets if placement % 2 == 0 else reversed(sets)
            ours = FusedAdam(mine, master_weights=dtype == torch.bfloat16, **SETTINGS)
            steps: dict[str, Step] = {"torch": torch_step(others), "FusedAdam": ours.step}
            for step in steps.values():
                step()
            for each, windows in interleave(steps, num_rounds, 1, CPU).items():
                cpu_ms[each] += [window.cpu_ms for window in windows]
        found[name] = record(cpu_ms, "torch", "FusedAdam")
    return found


def checkpoint(num_rounds: int = 12, num_layers: int = 8, width: int = 384) -> Record:
    model = GPT(
        GPTConfig(
            vocab_size=8192,
            seq_length=128,
            num_layers=num_layers,
            hidden_size=width,
            num_attention_heads=8,
        )
    )
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    tensors = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        tensors |= {f"optim.{name}.{key}": value for key, value in optimizer.state[param].items()}
    folder = pathlib.Path(tempfile.mkdtemp(prefix="checkpoint-speed-"))
    ours, theirs = folder / "ours", folder / "theirs"
    ways: dict[str, dict[str, Step]] = {
        "save": {
            "dcp": lambda: dcp_save(tensors, checkpoint_id=theirs),
            "graphfsdp": lambda: graphfsdp.save(ours, model, optimizer, keep_last=1),
        },
        "load": {
            "dcp": lambda: dcp_load(tensors, checkpoint_id=theirs),
            "graphfsdp": lambda: graphfsdp.load(ours, model, optimizer),
        },
    }
    found: Record = {"num_bytes": sum(tensor.nbytes for tensor in tensors.values())}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dcp warns that it runs in a single process
            for way, runs in ways.items():
                for run in runs.values():
                    run()
                windows = interleave(runs, num_rounds, 1, CPU)
                clock_ms = {each: [one.mean_ms for one in own] for each, own in windows.items()}
                found[way] = record(clock_ms, "dcp", "graphfsdp")
    finally:
        shutil.rmtree(folder)
    return found


def guards_of(case: Case, num_pairs: int) -> Record:
    """Time replays that ask their guards and replays that do not, in turn.

    What guards touch first, a replay finds in the caches: so the whole calls are compared.
    """
    contender = OwnContender(Setting(case, CPU), Scope.FULL_ITERATION)
    _, source = batch_source(case, CPU)
    batches = source.take(0, NUM_WARMUP_STEPS + 2 * num_pairs)
    for step, batch in enumerate(batches[:NUM_WARMUP_STEPS]):
        contender(batch, step)
    recording = contender.step._runner._recordings.latest
    assert recording is not None
    guards = recording.guards
    assert guards is not None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for step, batch in enumerate(batches[NUM_WARMUP_STEPS:]):
        asks = step % 2 == (step // 2) % 2  # each comes first in every other pair
        with nullcontext() if asks else mock.patch.object(guards, "changes", list):
            start = time.perf_counter()
            contender(batch, NUM_WARMUP_STEPS + step)
            seconds[asks].append(time.perf_counter() - start)
    contender.close()
    pairs = zip(seconds[True], seconds[False], strict=True)
    return {
        "name": case.workload.name,
        "num_tensors": len(contender.optimizer.param_groups[0]["params"]),
        "replay_us": statistics.median(seconds[True]) * 1e6,
        "share": statistics.median(1 - without / with_ for with_, without in pairs),
    }


def guards(cases: Sequence[Case], num_pairs: int = 1000) -> Record:
    found = [guards_of(case, num_pairs) for case in cases]
    return {"worst_share": max(each["share"] for each in found), "architectures": found}


def told(found: Record) -> Iterator[str]:
    for name, each in found.items():
        if isinstance(each, dict):
            yield f"{name}: {each['ms']} ms; {Spread(**each['speedup'])} times as fast"
    for each in found.get("architectures", ()):
        yield "{name}: {share:.2%} of {replay_us:.1f} us".format(**each)


QUESTIONS: Mapping[str, tuple[str, Callable[[], Record]]] = {
    # 148 tensors, with GPT-2's own vocabulary, which nobody has padded.
    "adam": ("adam_cpu", lambda: adam(sizes_of(find_preset("gpt2-124m").gpt(50257)))),
    "checkpoint": ("checkpoint_speed", checkpoint),
    "guards": ("guard_cost_cpu", lambda: guards([planned.case for planned in suite("zoo")])),
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in QUESTIONS:
        print(f"{__doc__}\nexpected one of: {', '.join(QUESTIONS)}", file=sys.stderr)
        return 2
    name, measure = QUESTIONS[sys.argv[1]]
    torch.set_num_threads(1)
    found = measure()
    for line in told(found):
        print(line)
    found["environment"] = asdict(find_environment(CPU))
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
