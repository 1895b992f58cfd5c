"""The CPU backend: what a recording keeps, drops and writes, one operator at a time."""

import cProfile
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import graphfsdp
from cpu_recording import (
    Node,
    ReplayUndo,
    StorageInfo,
    Value,
    geometry_of,
    record,
)
from helpers import check_against_eager
from zoo import ZOO

CPU = torch.device("cpu")


def test_what_nobody_reads_is_not_in_the_program() -> None:
    x = torch.ones(3)

    def iterate() -> list[Tensor]:
        unused = x.sin()
        unused.cos().add_(1)
        return [x.exp()]

    graph, _ = record(iterate)
    assert graph.facts.op_counts == {"aten.exp.default": 1}
    assert graph.facts.num_ops == 4


def test_views_of_existing_memory_cost_nothing_in_a_replay() -> None:
    x = torch.randn(4, 6)
    graph, _ = record(lambda: [x.t()[1:3].unsqueeze(0).expand(2, 2, 4).sum()])
    assert graph.facts.op_counts == {"aten.sum.default": 1}
    x.fill_(1)
    assert float(graph.replay()[0]) == 16


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda y: y,
    "view": lambda y: y[:, 1:],
    "transposed": lambda y: y.t(),
    "written_later": lambda y: y.add_(1),
    "view_of_written": lambda y: y.mul_(3)[0],
    "complex": lambda y: torch.complex(y, y).conj(),
    "imaginary": lambda y: torch.complex(y, y * 2).conj().imag,
    "other_dtype": lambda y: y.view(torch.int32),
    "from_split": lambda y: y.split(2, dim=1)[1],
    "from_unbind": lambda y: y.unbind(0)[2],
}


@pytest.mark.parametrize("name", KEPT)
def test_what_outlives_the_iteration_is_updated_by_replays(name: str) -> None:
    class Holder(nn.Module):
        kept: Tensor

    holder = Holder()
    x = torch.randn(3, 4)

    def iterate() -> list[Tensor]:
        y = x * 2
        holder.kept = KEPT[name](y)
        return [y.sum()]

    graph, _ = record(iterate, holder)
    kept = holder.kept
    assert graph.facts.num_escapes == 1
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert holder.kept is kept
        seen = kept.clone()
        expected = KEPT[name](x * 2)
        assert torch.equal(seen.resolve_conj(), expected.resolve_conj())


def test_nothing_is_left_installed_after_a_recording() -> None:
    def fail() -> list[Tensor]:
        torch.ones(2).sum().item()
        raise KeyError

    seen: list[str] = []

    def mine(frame: FrameType, event: str, arg: object) -> None:
        seen.append(event)

    for iterate in (lambda: [torch.ones(2)], fail):
        sys.setprofile(mine)
        try:
            record(iterate)
        except KeyError:
            pass
        finally:
            left = sys.getprofile()
            sys.setprofile(None)
        assert left is mine
        assert _get_current_dispatch_mode() is None
        assert not torch.overrides._get_current_function_mode_stack()
        assert not torch.nn.modules.module._global_forward_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
    assert "call" in seen, "the hook that was there did not go on being called"


def test_a_profile_goes_on_behind_a_recording() -> None:
    profile = cProfile.Profile()
    profile.enable()
    graph, _ = record(lambda: [torch.ones(2) * 2])
    graph.replay()
    profile.disable()
    # Behind a recording, which hears of calls by the same hook.
    assert type(graph).replay.__code__ in [entry.code for entry in profile.getstats()]


def test_replay_does_not_depend_on_the_surrounding_modes() -> None:
    def alternates(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        is_on = itertools.cycle([False, True])
        return lambda: torch.set_grad_enabled(next(is_on))

    case = replace(ZOO["mlp"], setup=alternates)
    check_against_eager(case, CPU)
    assert torch.is_grad_enabled()


def test_a_scalar_loss_is_not_computed_in_memory_of_another_size(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Torch warns on stderr when an out= form resizes what it is given."""
    x, y = torch.rand(256, 1, requires_grad=True), torch.rand(256, 1)

    def iterate() -> list[Tensor]:
        loss = nn.functional.mse_loss(x * 2, y)
        return [(loss * 3).detach()]

    graph, (expected,) = record(iterate)
    assert torch.equal(graph.replay()[0], expected)
    assert "resized" not in capfd.readouterr().err


def writes(*tensors: Tensor) -> Node:
    values = []
    for tensor in tensors:
        info = StorageInfo(StorageWeakRef(tensor.untyped_storage()), external=True, varies=True)
        values.append(Value(info, geometry_of(tensor), None))
    op = torch.ops.aten._foreach_add_.Scalar
    return Node(op, [values, 1.0], {}, [], "none")


SMALL, LARGE, HALF = 4, 1 << 19, 1 << 17


@pytest.mark.parametrize(
    ("nodes", "commits_at", "num_kept"),
    [
        ([[SMALL], [LARGE]], 1, 1),  # small writes before the first large one
        ([[SMALL], [HALF] * 4], 1, 1),  # too much in all
        ([[1] * 9], 0, 0),  # too many tensors
        ([[2, 3], [4]], None, 3),  # all is small
    ],
)
def test_what_is_written_before_the_first_large_write_is_kept(
    nodes: list[list[int]], commits_at: int | None, num_kept: int
) -> None:
    held = [[torch.zeros(size) for size in sizes] for sizes in nodes]
    point = ReplayUndo([writes(*tensors) for tensors in held], [])
    assert point.node == commits_at
    first = [geometry_of(tensor) for tensors in held[:commits_at] for tensor in tensors]
    assert [geometry_of(tensor) for tensor in point.kept] == first
    assert len(first) == num_kept


@pytest.mark.parametrize(("held_s", "patience_s", "num_escapes"), [(0.02, 20, 0), (None, 0.1, 1)])
def test_what_a_worker_thread_soon_lets_go_is_no_escape(
    held_s: float | None, patience_s: float, num_escapes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gloo's threads do with the buffers of a collective."""
    monkeypatch.setattr("graphfsdp._capture.cpu.graph._RELEASE_S", patience_s)
    threads: list[threading.Thread] = []
    is_over = threading.Event()

    def keep(tensor: Tensor) -> None:
        is_over.wait(held_s)
        del tensor

    def lend(tensor: Tensor) -> None:
        tensor.fill_(2.0)
        alias = tensor.detach()  # an object of its own; the argument dies with the call
        threads.append(threading.Thread(target=keep, args=(alias,)))
        threads[-1].start()

    weight = torch.ones(4)

    def iterate() -> list[Tensor]:
        buffer = torch.empty(4)
        torch.ops.graphfsdp_lending.lend_(buffer)
        return [buffer * weight]

    with torch.library._scoped_library("graphfsdp_lending", "DEF") as library:
        library.define("lend_(Tensor(a!) tensor) -> ()")
        library.impl("lend_", lend, "CPU")
        graph, results = record(iterate)
        weight.fill_(3.0)
        replayed = graph.replay()[0]
    is_over.set()
    for thread in threads:
        thread.join()
    assert graph.facts.num_escapes == num_escapes
    assert torch.equal(results[0], torch.full((4,), 2.0))
    assert torch.equal(replayed, torch.full((4,), 6.0))


class Twice(nn.Module):
    """A linear layer that runs twice, and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        out: Tensor = self.linear(x) * self.scale
        return out


def changed_by_a_hook(param: Any) -> None:
    param.grad.cos_()


def iterate(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    out = checkpoint(model.inner, x, use_reentrant=False, preserve_rng_state=False).square()
    with torch.no_grad():
        size = out.abs().mean()  # a metric before the backward pass
    loss: Tensor = out.sum()
    loss.backward()
    with torch.no_grad():
        torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 0.5)
    optimizer.step()
    scaled: Tensor = loss * size
    return scaled


def test_operators_belong_to_the_pass_and_the_module_that_called_them() -> None:
    model: Any = nn.ModuleDict({"inner": Twice()})
    model.inner.scale.register_post_accumulate_grad_hook(changed_by_a_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphfsdp.capture(model, optimizer, iteration=iterate) as step:
        for _ in range(4):
            step(torch.randn(2, 3))
        nodes = list(step.report().nodes())
    found: dict[str, list[tuple[str, str | None]]] = {}
    for node in nodes:
        site = node.site.phase.value, node.site.module
        found.setdefault(node.op.split(".")[1], []).append(site)
    assert found["abs"] == [("forward", None)]
    assert found["tanh"] == [("forward", "inner"), ("backward", "inner")]  # and recomputed
    assert found["cos_"] == [("backward", "inner")]
    assert [phase for phase, _ in found["_foreach_mul_"]] == ["optimizer"]
