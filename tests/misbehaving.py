"""Training steps that go wrong in a graph, beyond the operators of refused_programs.py.

Each program's line is marked ``# refused``. Sections are those of known failures in the field: an
opaque CUDA error, or a replay that goes on with old numbers without an error.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphfsdp import HazardKind
from probe import Inner, Program


@dataclass(frozen=True)
class Misbehaviour:
    """A program and its diagnosis.

    Attributes:
        program: The program.
        kind: What both capture and check say it is.
        op: Pattern of the operation's name.
        why: Part of the reason.
        fix: Part of the remedy.
        captured: ``capture`` cannot see it: it is in the table of test_footguns.py, and only a
            check finds it.
        has_line: The diagnosis has the line; else only the module, or the name of the tensor.
    """

    program: Program
    kind: HazardKind
    op: str | None
    why: str
    fix: str
    captured: bool = False
    has_line: bool = True


MISBEHAVIOURS: dict[str, Misbehaviour] = {}


def misbehaviour(
    kind: HazardKind,
    op: str | None,
    why: str,
    fix: str,
    *,
    captured: bool = False,
    has_line: bool = True,
) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        MISBEHAVIOURS[program.__name__] = Misbehaviour(
            program, kind, op, why, fix, captured, has_line
        )
        return program

    return register


READ = "reads a value of the iteration on the host"
ON_DEVICE = "keep the value on the device"


@misbehaviour(HazardKind.HOST_READ, "Tensor.__float__", READ, ON_DEVICE)
def legacy_constructor(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.Tensor([x[0, 0], x[0, 1]]).sum()  # refused


@misbehaviour(HazardKind.HOST_READ, "Tensor.__float__", READ, ON_DEVICE)
def typed_constructor(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.FloatTensor([h.detach().sum()])  # refused


@misbehaviour(HazardKind.HOST_READ, "aten._local_scalar_dense.default", READ, ON_DEVICE)
def list_of_tensors_that_is_read_back(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    history: list[Tensor] = vars(self).setdefault("history", [])
    history.append(h.detach().sum())
    return h * float(sum(history[-2:]))  # refused


@misbehaviour(HazardKind.HOST_READ, "aten._local_scalar_dense.default", READ, ON_DEVICE)
def maximum_of_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    largest: Tensor = max(x[0])  # refused
    return h * largest


@misbehaviour(HazardKind.HOST_READ, "aten._local_scalar_dense.default", READ, ON_DEVICE)
def gradient_that_is_read(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * float(grad.abs().max() > 1e9))  # refused
    return h


@misbehaviour(HazardKind.HIDDEN_WRITE, "Tensor.data_ptr", "hands out an address", "custom_op")
def written_by_ctypes(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    out = torch.ones(4)
    ctypes.memset(out.data_ptr(), 0, 8)  # refused
    return h * out


@misbehaviour(HazardKind.HIDDEN_WRITE, "torch.UntypedStorage.data_ptr", "address", "custom_op")
def address_of_a_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h + float(h.untyped_storage().data_ptr() == 0)  # refused


@misbehaviour(HazardKind.MEMORY, "torch.UntypedStorage.resize_", "below all", "full size")
def freed_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    kept = h.detach().clone()
    kept.untyped_storage().resize_(0)  # refused
    return h


@misbehaviour(HazardKind.THREAD, "threading.Thread.start", "another Python thread", "outside")
def work_on_a_thread(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    thread = threading.Thread(target=x.tolist)
    thread.start()  # refused
    thread.join()
    return h


@misbehaviour(HazardKind.THREAD, "ThreadPoolExecutor.submit", "another Python thread", "outside")
def work_on_a_pool(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        scale = pool.submit(lambda: float(x[0, 0])).result()  # refused
    return h * scale


@misbehaviour(HazardKind.BAKED_NUMBER, "random.Random.random", "runs no Python", "torch.rand")
def layer_drop(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if random.random() < 0.5 else h  # refused


@misbehaviour(HazardKind.BAKED_NUMBER, "random.Random.getrandbits", "runs no Python", "torch.rand")
def shuffled_by_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    order = random.Random(3)
    return h[:, order.choice([0, 1]) :].sum(dim=1, keepdim=True) * h  # refused


@misbehaviour(HazardKind.RECOMPUTE, r"aten\.bernoulli_?\..*", "second draw", "graphfsdp.recompute")
def dropout_that_is_recomputed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    def dropped(h: Tensor) -> Tensor:
        return nn.functional.dropout(h.sin(), 0.5)  # refused

    out = checkpoint(dropped, h, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out, Tensor)
    return out


@misbehaviour(HazardKind.STATE, None, "replaced 'body.inner.gate'", "in place", has_line=False)
def replaced_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate = self.gate * 0.9 + h.detach().mean(dim=0)  # refused
    return h * self.gate


@misbehaviour(HazardKind.STATE, None, "gave 'body.inner.gate' new", "in place", has_line=False)
def replaced_data(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate.data = self.gate * 0.9  # refused
    return h * self.gate


@misbehaviour(HazardKind.STATE, None, "then dropped it", "in place")
def replaced_closure(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    out = h + AVERAGE[0]  # refused
    AVERAGE[0] = 0.5 * AVERAGE[0] + h.detach().mean(dim=0)
    return out


@misbehaviour(
    HazardKind.BAKED_NUMBER, "aten.mul.Tensor", "in the next one", "in a tensor", captured=True
)
def python_counter(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    count: int = vars(self).get("count", 0) + 1
    vars(self)["count"] = count
    return h * count  # refused


@misbehaviour(HazardKind.BAKED_NUMBER, "aten.add.Tensor", "next one", "in a tensor", captured=True)
def clock(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h + time.perf_counter()  # refused


@misbehaviour(HazardKind.BAKED_NUMBER, "aten.mul.Tensor", "next one", "torch.rand", captured=True)
def numpy_randomness(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(numpy.random.default_rng().random())  # refused


@misbehaviour(HazardKind.CONTROL_FLOW, "aten..*", "one path for ever", "torch.where", captured=True)
def alternating_branch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    turn: int = vars(self).get("turn", 0) + 1
    vars(self)["turn"] = turn
    return h.sin() if turn % 2 else h.cos()  # refused


@misbehaviour(HazardKind.HIDDEN_WRITE, "aten.mul.Tensor", "NumPy array", "copy_", captured=True)
def written_by_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    SHARED[1][:] += 1
    return h * SHARED[0]  # refused


@misbehaviour(HazardKind.HOST_READ, "aten.mul.Tensor", "shows no call", "operations", captured=True)
def read_by_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    SHARED[0].add_(1)
    return h * float(SHARED[1][0])  # refused


ON_A_GPU = "pageable host memory"
MAKE = "make it on the device"


@misbehaviour(HazardKind.HOST_TENSOR, "torch.tensor", ON_A_GPU, MAKE, captured=True)
def literal_on_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # refused


@misbehaviour(HazardKind.HOST_TENSOR, "Tensor.to", ON_A_GPU, MAKE, captured=True)
def moved_to_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.ones(4).mul(2).to(x.device)  # refused


@misbehaviour(HazardKind.HOST_TENSOR, "aten.index.Tensor", ON_A_GPU, MAKE, captured=True)
def index_in_host_memory(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.arange(7, -1, -1)]  # refused


@misbehaviour(HazardKind.HOST_TENSOR, "aten.mul.Tensor", ON_A_GPU, MAKE, captured=True)
def array_of_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.from_numpy(numpy.ones(4, dtype=numpy.float32))  # refused


@misbehaviour(HazardKind.BAKED_NUMBER, "aten.mul.Tensor", "drawn in host", "device=", captured=True)
def number_drawn_in_host_memory(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(())  # refused


@misbehaviour(HazardKind.HOST_READ, "aten._local_scalar_dense.default", READ, "", captured=True)
def constant_of_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(torch.ones(3, device=x.device).sum())  # refused


AVERAGE = [torch.zeros(4)]
_MEMORY = torch.ones(4)
SHARED = (_MEMORY, _MEMORY.numpy())
