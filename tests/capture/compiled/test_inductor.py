"""Inductor: replays within a third of the bound; its process, what that leaves, how it ends."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.exc import CppCompileError

import graphfsdp
from graphfsdp.optim import FusedAdam
from helpers import Batch, Case, run
from ranks import on_ranks
from sharding_helpers import make_net, replayed_as_eager
from stand_in_compilers import (
    BOUNDS,
    LIMIT_S,
    Compiled,
    RefusedError,
    StretchGraph,
    as_it_is,
    assert_within_a_third_of_the_bound,
    compiling,
    compiling_by,
    inductor,
    needs_compiler,
)
from stand_in_compilers import worker as worker_module
from zoo_models import WIDTH

CPU = torch.device("cpu")


class Net(nn.Module):
    """Batch statistics, dropout, attention, tied weights, and an attribute that is kept."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.drop(self.embedding(tokens))
        hidden = hidden + nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        hidden = self.norm(hidden.flatten(0, 1).relu())
        self.kept = hidden.detach().float().mean()
        return nn.functional.cross_entropy(self.last(hidden).float(), tokens.flatten())


def tokens(generator: torch.Generator) -> Batch:
    return Batch((torch.randint(WIDTH, (6, 5), generator=generator),))


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
def test_training_is_within_the_bound_of_eager() -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.5, "skip_nonfinite": True, "microbatches": 2}
    case = Case(Net, tokens)
    expected = run(case, "none", CPU, num_steps=8, **options)
    got = run(case, "full_iteration", CPU, num_steps=8, compile=True, **options)
    assert_within_a_third_of_the_bound(expected, got, BOUNDS[torch.float32])
    assert "nodes in 2 pieces" in got.report.compiled[0], got.report.compiled  # the step is one


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.parametrize(("dtype", "compiles"), [(torch.float32, "auto"), (torch.bfloat16, True)])
def test_verification_is_by_the_bound(dtype: torch.dtype, compiles: bool | str) -> None:
    """With torch's AdamW as users make it, whose many operators are compiled as well."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, 16)
    model = nn.Sequential(first, nn.GELU(), nn.Linear(16, 3)).to(dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if dtype == torch.bfloat16:
        optimizer = FusedAdam(model.parameters(), lr=1e-3, master_weights=True)
    x = torch.randn(12, WIDTH, dtype=dtype)
    with graphfsdp.capture(
        model, optimizer, loss_fn=lambda m, x: m(x).float().square().mean(), compile=compiles
    ) as step:
        losses = [float(step(x)) for _ in range(8)]
        assert losses == sorted(losses, reverse=True)
        step.verify(2)
        assert float(step(x)) < losses[-1]
        lines = step.report().compiled
        assert not lines[0].startswith("0 of") or compiles == "auto", lines
        with torch.no_grad():
            kept = first.weight.clone()
        evaluated = [float(step.evaluate(x)) for _ in range(3)]
        assert evaluated == pytest.approx([evaluated[0]] * 3, rel=0.1)
        assert torch.equal(kept, first.weight)


MICROBATCHES = 2


def fails_on_rank_1(graph: StretchGraph) -> Compiled:
    if dist.get_rank() == 1:
        raise RuntimeError("no such luck")
    return as_it_is(graph)


def pays_on_rank_0(*runs: object) -> bool:
    return dist.get_rank() == 0


@pytest.mark.parametrize(
    ("strategy", "compiler", "compiles"),
    [
        ("optim_grads_params", as_it_is, True),
        ("optim_grads", fails_on_rank_1, True),
        ("optim", as_it_is, "auto"),
    ],
)
@on_ranks("ranks2")
def test_ranks_replay_as_eager(strategy: str, compiler: Any, compiles: bool | str) -> None:
    """Collectives stay where they were, also where the ranks keep other pieces."""
    with compiling_by(compiler), mock.patch.object(compiling, "_pays", pays_on_rank_0):
        trained = replayed_as_eager(
            lambda: make_net(strategy, 0.1), microbatches=MICROBATCHES, compile=compiles
        )
    first, *others = trained.report.compiled
    failed = (compiler is fails_on_rank_1 or compiles == "auto") and dist.get_rank() == 1
    assert first.startswith("0 of") is failed, first
    assert any("graphfsdp.reduce_scatter_" in line for line in others)


FORM = "((4, 5), (5, 1), torch.float32)"
HALF = FORM.replace("32", "16")
TEXT = "\n".join(
    [
        f"('x0', 'placeholder', (), {{}}, {FORM}, None)",
        f"('x1', 'placeholder', (), {{}}, {FORM}, None)",
        f"('half', torch.ops.aten._to_copy.default, (x0,), {{'dtype': torch.float16}}, {HALF}, 2)",
        f"('square', torch.ops.aten.mul.Tensor, (half, half), {{}}, {HALF}, 3)",
        f"('less', torch.ops.aten.mul.Tensor, (square, 0.01), {{}}, {HALF}, 4)",
        f"('sin', torch.ops.aten.sin.default, (x0,), {{}}, {FORM}, 0)",
        f"('add', torch.ops.aten.add.Tensor, (sin, x1), {{'alpha': 2}}, {FORM}, 1)",
        # Strides that torch would not give it, as some backward passes have, and a look by these.
        "('neg', torch.ops.aten.neg.default, (x1,), {}, ((4, 5), (1, 4), torch.float32), 5)",
        "('look', torch.ops.aten.as_strided.default, (neg, [20], [1]), {}, None, 6)",
        "('twice', torch.ops.aten.mul.Tensor, (look, 2.0), {}, ((20,), (1,), torch.float32), 7)",
        "('output', 'output', ((add, less, neg, twice),), {}, None, None)",
    ]
)
# Trains with a cache in a folder. With a text, Inductor is given that in place of any graph,
# and the number of its process is told at once.
TRAINING = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
import graphfsdp
from graphfsdp._capture.compiled import inductor
from torch import nn

folder, *texts = sys.argv[1:]
inductor._cache_folder = lambda: Path(folder)
begin, begun, compile = inductor._begin, [], inductor.Compiler.compile
def noted():
    begun.append(begin())
    if texts:
        print(begun[-1].pid, flush=True)
    return begun[-1]
inductor._begin = noted
if texts:
    text = SimpleNamespace(text=texts[0])
    inductor.Compiler.compile = lambda compiler, graph: compile(compiler, text)
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 1))
optimizer = graphfsdp.optim.FusedAdam(model.parameters(), lr=1e-2)
step = graphfsdp.capture(model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), compile=True)
losses = [float(step(torch.randn(12, 4))) for _ in range(8)]
names = ["torch._inductor", "torch._dynamo", "sympy"]
imported = [name for name in names if name in sys.modules]
print(json.dumps([losses, step.report().compiled[0], imported, len(begun)]))
"""


def graph(text: str = TEXT) -> Any:
    return SimpleNamespace(text=text)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder of our own; Inductor's has torch's headers, compiled, which take longest."""
    folder = tmp_path / "new" / "cache"
    monkeypatch.setattr(inductor, "_cache_folder", lambda: folder)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    yield folder
    assert not [path for path in folder.glob("*") if path.suffix not in (".so", ".pt")]


def begins_no_process() -> Any:
    raise AssertionError("it was compiled before")


def check(function: Callable[[list[Tensor]], list[Tensor]]) -> None:
    one, other = torch.randn(4, 5), torch.randn(4, 5)
    one[0] = 1000
    result, less, negative, twice = function([one, other])
    assert negative.stride() == (1, 4)
    assert torch.equal(negative, -other)
    assert torch.equal(twice, -2 * other.t().reshape(-1))
    torch.testing.assert_close(result, one.sin() + 2 * other)
    # Infinite in the first row. Inductor of torch 2.15 rounds numbers of a program as well.
    expected = one.half() * one.half() * 0.01
    torch.testing.assert_close(less, expected, rtol=torch.finfo(torch.float16).eps, atol=1e-7)


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
def test_what_is_damaged_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with inductor.Compiler() as compiler:  # one process makes all of them
        check(compiler.compile(graph()))
        [library], [made] = cache.glob("*.so"), cache.glob("*.pt")
        whole = library.read_bytes()
        for path, contents in ((library, whole[:-100]), (made, b"")):
            with monkeypatch.context() as patch, inductor.Compiler() as other:
                patch.setattr(inductor, "_begin", begins_no_process)
                check(other.compile(graph()))
            path.unlink()  # what is loaded stays as it was
            path.write_bytes(contents)
            check(compiler.compile(graph()))
            assert library.read_bytes() == whole
    # Inductor's constants come last.
    torch.save({**torch.load(made), "constants": [torch.ones(4, 5)]}, made)
    with inductor.Compiler() as compiler:
        result, *_ = compiler.compile(graph())([torch.zeros(4, 5)])
    assert torch.equal(result, torch.full((4, 5), 2.0))
    assert capfd.readouterr().out == ""


@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.usefixtures("cache")
def test_what_is_refused_is_so_without_a_process_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = TEXT.replace("sin.default, (x0,)", "mm.default, (x0, x1)")
    text = text.replace("{'alpha': 2}, ((4, 5), (5, 1)", "{'alpha': 2}, ((4, 5), (6, 1)")
    found = []
    for _ in range(2):
        with inductor.Compiler() as compiler, pytest.raises(RefusedError) as caught:
            compiler.compile(graph(text))
        monkeypatch.setattr(inductor, "_begin", begins_no_process)
        found.append(caught.value.why)
    assert found[0] == found[1]
    assert found[0].keys() == {0, 1}
    assert "raises RuntimeError" in found[0][0]
    assert found[0][1] == "has a result of other strides than its description"


def test_what_inductors_code_cannot_call_is_refused() -> None:
    """By the text of that code, which takes a compiler a minute."""
    small, large = (
        f"((1, 1, {n}, {n}), ({n * n}, {n * n}, {n}, 1), torch.float32)" for n in (4, 8)
    )
    back = "torch.ops.aten.upsample_bilinear2d_backward.default"
    read = worker_module.Graph(
        [
            f"('x', 'placeholder', (), {{}}, {large}, None)",
            f"('twice', torch.ops.aten.mul.Tensor, (x, 2.0), {{}}, {large}, 0)",
            f"('back', {back}, (twice, [8, 8], [1, 1, 4, 4], False, 2.0, 2.0), {{}}, {small}, 1)",
            "('output', 'output', ((back,),), {}, None, None)",
        ]
    )
    calls = 'static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::{}", "{}");'
    read.refuse_uncallable(calls.format("mul", "Tensor"))  # which takes no list of numbers
    assert not read.refused
    read.refuse_uncallable(calls.format("upsample_bilinear2d_backward", ""))
    assert read.refused == {1: "has no function that Inductor's code could call"}


@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.usefixtures("cache")
def test_what_inductor_raises_and_how_its_process_ends_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "get_deterministic_debug_mode", lambda: 1)
    with inductor.Compiler() as compiler:
        with pytest.raises(RuntimeError, match="SyntaxError"):
            compiler.compile(graph(f"{TEXT}\n("))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            compiler.compile(graph("1 / (1 - torch.get_deterministic_debug_mode())"))
        worker = tmp_path / "worker.py"
        text = TEXT + "#" * (1 << 20)  # more than a pipe holds
        for last, how in (("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "SIGKILL")):
            worker.write_text(f"import os, sys\n{last}")
            monkeypatch.setattr(inductor, "_WORKER", worker)
            compiler._end()
            with pytest.raises(RuntimeError, match=f"Inductor's process ended with .*{how}"):
                compiler.compile(graph(text))
    output = "x.cpp: In function\nx.cpp:1:10: fatal error: Python.h: No such file\nx.cpp: error: y"
    said = worker_module.told(CppCompileError(["g++", "x.cpp"], output))
    assert said == "CppCompileError: C++ compile error: Python.h: No such file"


@needs_compiler
@pytest.mark.time_limit(LIMIT_S)
def test_a_second_process_imports_no_inductor_and_compiles_nothing(cache: Path) -> None:
    runs = []
    for _ in range(2):
        command = [sys.executable, "-c", TRAINING, str(cache)]
        done = subprocess.run(command, capture_output=True, check=True)
        runs.append(json.loads(done.stdout))
    (first_losses, line, _, num_first), (losses, _, imported, num_begun) = runs
    assert losses == first_losses
    assert not line.startswith("0 of"), line
    assert (num_first, num_begun) == (1, 0)
    assert not imported


@pytest.mark.time_limit(LIMIT_S)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_the_one_that_began_it(cache: Path, number: signal.Signals) -> None:
    text = "__import__('time').sleep(1000)"
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(cache), text],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        assert is_alive(worker)
        child.send_signal(number)
        child.wait()
        while is_alive(worker):  # until the time limit
            time.sleep(0.05)


def test_the_cache_lies_in_inductors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert inductor._cache_folder() == Path(default_cache_dir(), "graphfsdp")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert inductor._cache_folder() == tmp_path / "graphfsdp"


def is_alive(process: int) -> bool:
    """Tell whether a process runs; one that nobody has waited for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
