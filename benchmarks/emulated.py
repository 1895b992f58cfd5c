"""Writes the tables of docs/emulated.md: what one iteration launches, and what memory it takes.

``make cuda-tables`` has tests/cuda_stand_in on its path and runs each contender above it, in a
process of its own, with kernels that compute nothing, so that full sizes fit: memory is only
reserved. What is counted is exact for torch's own launches and torch's own allocator; nothing here
is a time.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

import graphfsdp
from benchmarks.readme_table import ROOT, with_section
from cuda_stand_in import above, library
from graphfsdp.base.op_tensors import OpCall, OperatorMode, flat_tensors
from graphfsdp.bench import contenders
from graphfsdp.bench.results import Table
from graphfsdp.bench.workloads import find_workload
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.plan import CALL_S, DEVICES, NODE_S

PAGES = tuple(ROOT / "docs" / name for name in ("emulated.md", "beside.md"))
WORKLOAD, BATCH_SIZE = "gpt2-124m", 8
NUM_CALLS = 6  # three warm-ups, the capture, and two of what is counted
NUM_RANKS = 2
DEVICE = torch.device("cuda", int(os.environ.get("RANK", "0")))
# More than anybody takes: where it is short, torch's allocator gives back what it had reserved.
DEVICE_BYTES = 140 << 30

Train = Callable[..., object]
Numbers = dict[str, float]


# ---- who trains ----


def _model() -> nn.Module:
    """Return it with weights, and so gradients and moments, in bfloat16."""
    return find_workload(WORKLOAD).make().bfloat16().to(DEVICE)


class Plain:
    """PyTorch's loop with fused AdamW, and the same in one graph or in two.

    With two, forward and backward are one and clipping and optimizer the other, as torchtitan has
    it. Gradients belong to the graph, so that nothing is zeroed or copied.
    """

    def __init__(
        self, num_graphs: int = 0, compile_mode: str | None = None, model: nn.Module | None = None
    ) -> None:
        self._model = _model() if model is None else model
        if compile_mode is not None:
            self._model.compile(mode=compile_mode)
        self._params = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            self._params, fused=True, capturable=num_graphs > 0, **contenders.ADAM
        )
        self._num_graphs = num_graphs
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._inputs: list[Tensor] = []
        self._loss = torch.empty(0)
        self._num_calls = 0
        self._stream = torch.cuda.Stream()

    def __call__(self, *batch: Tensor) -> Tensor:
        if not self._num_graphs:
            self._inputs = list(batch)
            self._iterate()
            return self._loss
        self._num_calls += 1
        self._inputs = self._inputs or [part.clone() for part in batch]
        torch._foreach_copy_(self._inputs, batch)
        if self._num_calls <= contenders.WARMUP_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._iterate()
            torch.cuda.current_stream().wait_stream(self._stream)
            return self._loss
        if not self._graphs:
            self._capture()
        for graph in self._graphs:
            graph.replay()
        return self._loss.clone()

    def _capture(self) -> None:
        one, two = (self._iterate,), (self._forward_backward, self._step)
        pool = torch.cuda.graph_pool_handle()
        for part in one if self._num_graphs == 1 else two:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                part()
            self._graphs.append(graph)

    def _iterate(self) -> None:
        self._forward_backward()
        self._step()
        self._optimizer.zero_grad(set_to_none=True)

    def _forward_backward(self) -> None:
        loss: Tensor = self._model(*self._inputs)
        loss.backward()
        self._loss = loss.detach()

    def _step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, contenders.MAX_GRAD_NORM)
        self._optimizer.step()


def _ours(scope: str, *, compiled: bool = False, model: nn.Module | None = None) -> Train:
    model = _model() if model is None else model
    narrow = torch.bfloat16
    optimizer = FusedAdam(
        model.parameters(), exp_avg_dtype=narrow, exp_avg_sq_dtype=narrow, **contenders.ADAM
    )
    return graphfsdp.capture(
        model, optimizer, scope=scope, max_grad_norm=contenders.MAX_GRAD_NORM, compile=compiled
    )


def _sharded(shard: Callable[..., object]) -> nn.Module:
    model = _model()
    for module in (*model.get_submodule("blocks").children(), model):
        shard(module)
    return model


# By the sections of the pages that they are in.
KINDS: Mapping[str, Mapping[str, Callable[[], Train]]] = MappingProxyType(
    {
        "narrow": {
            "PyTorch, AdamW(fused)": Plain,
            "the same, one graph by hand": lambda: Plain(1),
            "the same, two graphs as in torchtitan": lambda: Plain(2),
            "graphfsdp, eager": lambda: _ours("none"),
            "graphfsdp, captured": lambda: _ours("full_iteration"),
        },
        "compiled": {
            "torch.compile, AdamW(fused)": lambda: Plain(0, "default"),
            "the same, reduce-overhead": lambda: Plain(0, "reduce-overhead"),
            "the same, two graphs as in torchtitan, compiled": lambda: Plain(2, "default"),
            "graphfsdp, compile=True, captured": lambda: _ours("full_iteration", compiled=True),
        },
        "ranked": {
            "FSDP2, two graphs as in torchtitan": lambda: Plain(
                2, model=_sharded(torch_fsdp.fully_shard)
            ),
            "graphfsdp, two ranks, eager": lambda: _ours(
                "none", model=_sharded(graphfsdp.fully_shard)
            ),
            "graphfsdp, two ranks, captured": lambda: _ours(
                "full_iteration", model=_sharded(graphfsdp.fully_shard)
            ),
        },
    }
)


# ---- what is counted ----


class _Operators(OperatorMode):
    """Adds up what operators read and write that launch something, and what they take at least.

    Each operand counts once. ``seconds`` are by device: of one kernel after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_captures: dict[str, float] = dict.fromkeys(("operand_bytes", *DEVICES), 0)
        self.outside = self.in_captures.copy()

    def on_op(self, call: OpCall) -> Any:
        captures = torch.cuda.is_current_stream_capturing()
        before = library.counts().launches
        result = call.run()
        if library.counts().launches > before:
            written = call.written
            known = set(map(id, written))
            read = [tensor for tensor in call.read() if id(tensor) not in known]
            made = [*written, *flat_tensors([result])]
            num_bytes = sum(map(_nbytes, (*read, *{id(each): each for each in made}.values())))
            found = self.in_captures if captures else self.outside
            found["operand_bytes"] += num_bytes
            # c10d says of no coalesced collective that it writes what it is given.
            dtype = (made or read)[0].dtype
            for name, device in DEVICES.items():
                busy_s = _flops(call, result) / device.flops_per_s(dtype)
                # A kernel takes as long as its arithmetic or its bytes, and the gap to the next.
                found[name] += NODE_S + max(busy_s, num_bytes / device.memory_rate)
        return result


def _flops(call: OpCall, result: Any) -> int:
    count = flop_registry.get(call.op.overloadpacket)
    return 0 if count is None else int(count(*call.args, **call.kwargs, out_val=result))


def _nbytes(tensor: Tensor) -> int:
    if tensor.device.type != "cuda" or not tensor.numel():
        return 0
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    return math.prod(sizes) * tensor.element_size()


def measure(kind: str, name: str) -> Numbers:
    """Train with a contender, and count its last iteration; in a process of its own."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not played
    if kind == "ranked":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    # Under a mode torch.compile would run what it has compiled operator by operator.
    # On several ranks our captures want to see streams wait for each other.
    counts_bytes = kind not in ("compiled", "ranked")
    train = KINDS[kind][name]()
    size = BATCH_SIZE, find_workload(WORKLOAD).items_per_sample
    batch = [torch.zeros(size, dtype=torch.int64, device=DEVICE) for _ in "xy"]
    torch.cuda.empty_cache()  # what made the weights
    torch.cuda.reset_peak_memory_stats()
    captured: dict[str, float] = {}
    for number in range(NUM_CALLS):
        operators = _Operators()
        torch.cuda.synchronize()
        before = library.counts()
        is_looked_at = counts_bytes and number >= contenders.WARMUP_STEPS
        with operators if is_looked_at else contextlib.nullcontext():
            train(*batch)
        found = library.counts().since(before)
        if not captured and any(operators.in_captures.values()):
            captured = operators.in_captures
    return {
        **found._asdict(),
        **{key: captured.get(key, 0) + outside for key, outside in operators.outside.items()},
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def measured(kind: str, name: str) -> Numbers:
    environment = above.environment() | {
        "CUDA_STAND_IN_KERNELS": "none",
        "CUDA_STAND_IN_MEMORY": str(DEVICE_BYTES),
        "GRAPHFSDP_AUDIT": "0",  # eleven of the first 2,048 iterations, and none of these
    }
    launcher: list[str] = []
    if kind == "ranked":
        environment |= {"CUDA_STAND_IN_DEVICES": str(NUM_RANKS)}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "benchmarks.emulated", "--measure", kind, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    found: Numbers = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- the tables ----


def table(
    title: str, columns: Mapping[str, Callable[[Numbers], str]], found: Mapping[str, Numbers]
) -> str:
    rows = [
        (name, *(cell(numbers) for cell in columns.values())) for name, numbers in found.items()
    ]
    return Table("", (title, *columns), rows).markdown()


def tables(kind: str, found: Mapping[str, Numbers]) -> dict[str, str]:
    """Return them by their sections of the pages."""

    def count(key: str) -> Callable[[Numbers], str]:
        return lambda numbers: str(numbers[key])

    def mebibytes(key: str) -> Callable[[Numbers], str]:
        return lambda numbers: f"{numbers[key] / 2**20:,.0f}"

    launches = {
        "calls of the host": count("calls"),
        **{name: count(name) for name in ("graphs", "kernels", "copies")},
        "memsets": count("fills"),
        "waits of the host": count("waits"),
        "moved by copies, MiB": mebibytes("moved_bytes"),
    }
    (*_, ours) = (numbers for name, numbers in found.items() if name.endswith("captured"))
    memory = {
        "reserved, MiB": mebibytes("reserved"),
        "allocated, MiB": mebibytes("allocated"),
        "reserved, of graphfsdp captured": (
            lambda numbers: f"{numbers['reserved'] / ours['reserved']:.3f}"
        ),
    }
    made = {f"memory_{kind}": table("peak", memory, found)}
    if all(numbers["operand_bytes"] for numbers in found.values()):
        launches["read and written by operators, MiB"] = mebibytes("operand_bytes")

        def least_ms(key: str) -> Callable[[Numbers], str]:
            return lambda numbers: f"{1e3 * max(numbers[key], numbers['calls'] * CALL_S):.2f}"

        bounds = {device.name: least_ms(key) for key, device in DEVICES.items()}
        made[f"bounds_{kind}"] = table("bound, not measured, ms", bounds, found)
    return made | {f"launches_{kind}": table("one iteration", launches, found)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "CONTENDER"))
    one = parser.parse_args(arguments).measure
    if one is not None:
        numbers = json.dumps(measure(*one))
        if DEVICE.index == 0:  # of a launcher's ranks the first
            print(numbers)
        return 0
    sections: dict[str, str] = {}
    for kind, names in KINDS.items():
        sections |= tables(kind, {name: measured(kind, name) for name in names})
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for section, made in sections.items():
            text = with_section(text, section, made)
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
