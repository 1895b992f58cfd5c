"""Writes the tables of docs/emulated.md: what one iteration launches, and what memory it takes.

``make cuda-tables`` has tests/cuda_stand_in on its path and runs each contender above it, in a
process of its own, with kernels that compute nothing, so that full sizes fit: memory is only
reserved. What is counted is exact for torch's own launches and torch's own allocator; nothing here
is a time.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
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
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import flop_registry

import graphfsdp
from benchmarks.readme_table import ROOT, with_section
from cuda_stand_in import above, library
from graphfsdp.base.op_tensors import OpCall, OperatorMode, flat_tensors
from graphfsdp.bench import contenders, workloads
from graphfsdp.bench.results import Table
from graphfsdp.bench.workloads import Case, find_workload
from graphfsdp.config import ShardingStrategy
from graphfsdp.optim import FusedAdam
from graphfsdp.planning.plan import CALL_S, DEVICES, NODE_S, arithmetic_s
from graphfsdp.training.arguments import find_preset
from graphfsdp.training.build import make_model, make_optimizer
from graphfsdp.training.ranks import Ranks
from played_group import played_ranks

DOCS = ROOT / "docs"
PAGES = tuple(DOCS / name for name in ("emulated.md", "notes/2026-11-26_launches.md", "beside.md"))
WORKLOAD, BATCH_SIZE = "gpt2-124m", 8
LARGE_MODEL, NUM_PLAYED = "llama3-8b", 8
NUM_CALLS = 6  # three warm-ups, the capture, and two of what is counted
NUM_RANKS = 2
DEVICE = torch.device("cuda", int(os.environ.get("RANK", "0")))
_MIB = 1 << 20
# More than anybody takes: where it is short, torch's allocator gives back what it had reserved.
DEVICE_BYTES = 140 << 30

Train = Callable[[Tensor, Tensor], object]


# ---- who trains: weights, gradients and moments in bfloat16 ----


def _model() -> nn.Module:
    return workloads.make_model(find_workload(WORKLOAD).model).bfloat16().to(DEVICE)


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
            return self._iterate(*batch)
        self._num_calls += 1
        if not self._inputs:
            self._inputs = [part.clone() for part in batch]
        torch._foreach_copy_(self._inputs, batch)
        if self._num_calls <= contenders.WARMUP_STEPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._loss = self._iterate(*self._inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return self._loss
        if not self._graphs:
            self._capture()
        for graph in self._graphs:
            graph.replay()
        return self._loss.clone()

    def _capture(self) -> None:
        parts: list[Callable[[], object]] = [self._forward_backward, self._step]
        if self._num_graphs == 1:
            parts = [functools.partial(self._iterate, *self._inputs)]
        pool = torch.cuda.graph_pool_handle()
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                part()
            self._graphs.append(graph)

    def _iterate(self, *batch: Tensor) -> Tensor:
        self._forward_backward(*batch)
        self._step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._loss

    def _forward_backward(self, *batch: Tensor) -> None:
        loss: Tensor = self._model(*(batch or self._inputs))
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


# ---- who trains: float32 weights, gradients and moments, computed in bfloat16 ----


def _of_bench(name: str) -> Train:
    case = Case(find_workload(WORKLOAD), "bf16", BATCH_SIZE)
    ranks = Ranks(launched=name != "pytorch")
    if ranks.launched:
        store = HashStore()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=DEVICE
        )
    if name == "megatron_fsdp":
        # It compares numbers on the device, which nobody computes here.
        from megatron_fsdp import param_and_grad_buffer

        param_and_grad_buffer.validate_uneven_dtensor = lambda _: None
    spec = contenders.CONTENDERS_BY_NAME[name]
    made = spec.make(contenders.Setting(case, DEVICE, ranks=ranks))
    return lambda *batch: made(batch, 0)


# ---- who trains on two ranks, everything in bfloat16 ----


def _on_ranks(scope: str | None) -> Train:
    """Return FSDP2 in two graphs where no scope of ours is given."""
    shard = torch_fsdp.fully_shard if scope is None else graphfsdp.fully_shard
    model = _model()
    for block in model.get_submodule("blocks").children():
        shard(block)
    shard(model)
    return Plain(2, model=model) if scope is None else _ours(scope, model=model)


# ---- who trains Llama-3-8B, as one rank of eight: float32, computed in bfloat16 ----


def _large(scope: str | None, num_graphs: int = 0, *, root_reshards: bool | None = None) -> Train:
    """Return FSDP2 with torch's fused AdamW where no scope of ours is given."""
    config = find_preset(LARGE_MODEL)
    assert config.vocab_size is not None
    model = make_model(config, config.vocab_size, torch.device("meta"), torch.float32)
    mesh = init_device_mesh("cuda", (NUM_PLAYED,))
    if scope is None:
        policy = torch_fsdp.MixedPrecisionPolicy(config.param_dtype, torch.float32)
        for module in (*model.blocks, model):
            torch_fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        return Plain(num_graphs, model=model.to_empty(device=DEVICE))
    strategy = ShardingStrategy.OPTIM_GRADS_PARAMS
    for module in (*model.blocks, model):
        graphfsdp.fully_shard(
            module,
            mesh,
            strategy=strategy,
            mp_policy=config.mp_policy,
            reshard_after_forward=root_reshards,
        )
    model.to_empty(device=DEVICE)
    optimizer = make_optimizer(config, model, sharded=True)
    limit = contenders.MAX_GRAD_NORM
    return graphfsdp.capture(
        model, optimizer, scope=scope, max_grad_norm=limit, mp_policy=config.mp_policy
    )


LARGE: Mapping[str, Callable[[], Train]] = MappingProxyType(
    {
        "FSDP2, AdamW(fused)": functools.partial(_large, None),
        "FSDP2, one of eight, two graphs": functools.partial(_large, None, 2),
        "graphfsdp, one of eight, eager": functools.partial(_large, "none"),
        "graphfsdp, one of eight, the root gathered again, captured": functools.partial(
            _large, "full_iteration", root_reshards=True
        ),
        "graphfsdp, one of eight, captured": functools.partial(_large, "full_iteration"),
    }
)
RANKED: Mapping[str, Callable[[], Train]] = MappingProxyType(
    {
        "FSDP2, two graphs as in torchtitan": functools.partial(_on_ranks, None),
        "graphfsdp, two ranks, eager": functools.partial(_on_ranks, "none"),
        "graphfsdp, two ranks, captured": functools.partial(_on_ranks, "full_iteration"),
    }
)
NARROW: Mapping[str, Callable[[], Train]] = MappingProxyType(
    {
        "PyTorch, AdamW(fused)": Plain,
        "the same, one graph by hand": functools.partial(Plain, 1),
        "the same, two graphs as in torchtitan": functools.partial(Plain, 2),
        "graphfsdp, eager": functools.partial(_ours, "none"),
        "graphfsdp, captured": functools.partial(_ours, "full_iteration"),
    }
)
COMPILED: Mapping[str, Callable[[], Train]] = MappingProxyType(
    {
        "torch.compile, AdamW(fused)": functools.partial(Plain, 0, "default"),
        "the same, reduce-overhead": functools.partial(Plain, 0, "reduce-overhead"),
        "the same, two graphs as in torchtitan, compiled": functools.partial(Plain, 2, "default"),
        "graphfsdp, compile=True, captured": functools.partial(
            _ours, "full_iteration", compiled=True
        ),
    }
)
WIDE: Mapping[str, Callable[[], Train]] = MappingProxyType(
    {
        "PyTorch, autocast": functools.partial(_of_bench, "pytorch"),
        "FSDP2, one rank": functools.partial(_of_bench, "fsdp2"),
        "Megatron-FSDP 0.6.1, one rank": functools.partial(_of_bench, "megatron_fsdp"),
        "graphfsdp, one rank, eager": functools.partial(_of_bench, "eager"),
        "graphfsdp, one rank, captured": functools.partial(_of_bench, "full_iteration"),
    }
)
CONTENDERS = MappingProxyType({**NARROW, **COMPILED, **WIDE, **RANKED, **LARGE})


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
            read = [tensor for tensor in call.read() if not _is_among(tensor, written)]
            made = [*written, *flat_tensors([result])]
            num_bytes = sum(map(_nbytes, (*read, *{id(each): each for each in made}.values())))
            found = self.in_captures if captures else self.outside
            found["operand_bytes"] += num_bytes
            # c10d says of no coalesced collective that it writes what it is given.
            dtype = (made or read)[0].dtype
            for name, device in DEVICES.items():
                busy_s = arithmetic_s(_flops(call, result), dtype, device)
                # A kernel takes as long as its arithmetic or its bytes, and the gap to the next.
                found[name] += NODE_S + max(busy_s, num_bytes / device.memory_rate)
        return result


def _flops(call: OpCall, result: Any) -> int:
    count = flop_registry.get(call.op.overloadpacket)
    if count is None:
        return 0
    args = list(call.args)
    if "scaled_dot_product" in call.name:  # torch's formula has it that keys have as many heads
        heads = max(each.shape[1] for each in args if isinstance(each, Tensor) and each.dim() == 4)
        for index, each in enumerate(args):
            if isinstance(each, Tensor) and each.dim() == 4:
                shape = (len(each), heads, *each.shape[2:])
                args[index] = torch.empty(shape, device="meta")
    return int(count(*args, **call.kwargs, out_val=result))


def _is_among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _nbytes(tensor: Tensor) -> int:
    if tensor.device.type != "cuda":
        return 0
    sizes = (size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    numel = 1
    for size in sizes:
        numel *= size
    return numel * tensor.element_size() if tensor.numel() else 0


def measure(name: str) -> dict[str, float]:
    """Train with a contender, and count its last iteration; in a process of its own."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is not played
    if name in LARGE:
        with played_ranks(NUM_PLAYED):
            return _counted(name, (1, find_preset(LARGE_MODEL).seq_length))
    if name in RANKED:
        torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return _counted(name, (BATCH_SIZE, find_workload(WORKLOAD).items_per_sample))


def _counted(name: str, size: tuple[int, int]) -> dict[str, float]:
    train = CONTENDERS[name]()
    batch = [torch.zeros(size, dtype=torch.int64, device=DEVICE) for _ in "xy"]
    torch.cuda.empty_cache()  # what made the weights
    torch.cuda.reset_peak_memory_stats()
    captured: dict[str, float] = {}
    for number in range(NUM_CALLS):
        operators = _Operators()
        torch.cuda.synchronize()
        before = library.counts()
        # Under a mode torch.compile would run what it has compiled operator by operator.
        # On several ranks our captures want to see streams wait for each other.
        is_counted = name not in COMPILED and name not in RANKED
        counts_bytes = number >= contenders.WARMUP_STEPS and is_counted
        with operators if counts_bytes else contextlib.nullcontext():
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


def measured(name: str) -> dict[str, float]:
    environment = above.environment() | {
        "CUDA_STAND_IN_KERNELS": "none",
        "CUDA_STAND_IN_MEMORY": str(DEVICE_BYTES),
        "GRAPHFSDP_AUDIT": "0",  # eleven of the first 2,048 iterations, and none of these
    }
    launcher: list[str] = []
    if name in RANKED:
        environment |= {"CUDA_STAND_IN_DEVICES": str(NUM_RANKS)}
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "benchmarks.emulated", "--measure", name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _is_here(name: str) -> bool:
    return "Megatron" not in name or importlib.util.find_spec("megatron_fsdp") is not None


# ---- the tables ----


def launches(found: Mapping[str, Mapping[str, float]]) -> str:
    heading: tuple[str, ...] = (
        *("one iteration", "calls of the host", "graphs", "kernels", "copies", "memsets"),
        *("waits of the host", "moved by copies, MiB", "read and written by operators, MiB"),
    )
    keys = ("calls", "graphs", "kernels", "copies", "fills", "waits")
    rows: list[tuple[str, ...]] = [
        (
            name,
            *(str(numbers[key]) for key in keys),
            *(f"{numbers[key] / _MIB:,.0f}" for key in ("moved_bytes", "operand_bytes")),
        )
        for name, numbers in found.items()
    ]
    if not any(numbers["operand_bytes"] for numbers in found.values()):
        heading, rows = heading[:-1], [row[:-1] for row in rows]
    return Table("", heading, rows).markdown()


def memory(found: Mapping[str, Mapping[str, float]]) -> str:
    heading = ("peak", "reserved, MiB", "allocated, MiB", "reserved, of graphfsdp captured")
    ours = [numbers for name, numbers in found.items() if name.endswith("captured")][-1]
    rows = [
        (
            name,
            f"{numbers['reserved'] / _MIB:,.0f}",
            f"{numbers['allocated'] / _MIB:,.0f}",
            f"{numbers['reserved'] / ours['reserved']:.3f}",
        )
        for name, numbers in found.items()
    ]
    return Table("", heading, rows).markdown()


def bounds(found: Mapping[str, Mapping[str, float]]) -> str:
    """Return the least times of contenders whose operators were counted, in ms."""
    heading = ("bound, not measured, ms", *(device.name for device in DEVICES.values()))
    rows = [
        (name, *(f"{1e3 * max(numbers[key], numbers['calls'] * CALL_S):.2f}" for key in DEVICES))
        for name, numbers in found.items()
    ]
    return Table("", heading, rows).markdown()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", metavar="CONTENDER")
    name = parser.parse_args(arguments).measure
    if name is not None:
        numbers = json.dumps(measure(name))
        if DEVICE.index == 0:  # of a launcher's ranks the first
            print(numbers)
        return 0
    sections: dict[str, str] = {}
    kinds = {"narrow": NARROW, "compiled": COMPILED, "wide": WIDE}
    kinds |= {"ranked": RANKED, "large": LARGE}
    for kind, names in kinds.items():
        found = {each: measured(each) for each in names if _is_here(each)}
        sections |= {f"launches_{kind}": launches(found), f"memory_{kind}": memory(found)}
        if all(numbers["operand_bytes"] for numbers in found.values()):
            sections[f"bounds_{kind}"] = bounds(found)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for section, table in sections.items():
            text = with_section(text, section, lambda table=table: table)  # type: ignore[misc]
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
