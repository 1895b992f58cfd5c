"""Programs in the middle of a forward pass that are refused.

Each refused program's line is marked ``# refused``. The table says who refuses it, by which kind of
hazard, with which message and remedy, and whether CUDA refuses it too.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from graphfsdp import CaptureError, HazardKind
from mid_forward import Inner, Program


@dataclass(frozen=True)
class Refused:
    """A program that must be refused.

    Attributes:
        program: The program.
        kind: What both ``capture`` and ``check`` say it is.
        op: Pattern of the name of the operation; None if it has none.
        why: Part of the reason.
        fix: Part of the remedy.
        by: "both", or only "capture" (what a recording minds alone), or only "check" (what the
            capture cannot see: see the silent ones in test_footguns.py).
        cpu_only: On CUDA it is legal, or fails before it reaches a capture.
        driver: CUDA refuses it too, without our rules (test_cuda_graph.py), if it gets that far.
        target: Whose rules the check judges by.
        has_line: The diagnosis has the line; else only the module, or the name of the tensor.
        module: Where it is read; a read below the dispatcher in a backward pass has no module.
        keeps_state: It moves state of Python, so that a second run of it is another one.
    """

    program: Program
    kind: HazardKind
    op: str | None
    why: str
    fix: str = ""
    by: str = "both"
    cpu_only: bool = False
    driver: bool = True
    target: str = "cpu"
    has_line: bool = True
    keeps_state: bool = False
    module: str | None = "body.inner"


REFUSED: dict[str, Refused] = {}


def refused(
    kind: HazardKind, op: str | None, why: str, fix: str = "", **more: Any
) -> Callable[[Program], Program]:
    """Register an operation that a rule names."""

    def register(program: Program) -> Program:
        REFUSED[program.__name__] = Refused(program, kind, op, why, fix, **more)
        return program

    return register


# A known failure of the field: an opaque CUDA error, or a replay with old numbers and no error.
misbehaves = partial(refused, cpu_only=True, target="cuda", keeps_state=True)

HOST_READ, SHAPE = HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE
HIDDEN_WRITE, MEMORY, THREAD = HazardKind.HIDDEN_WRITE, HazardKind.MEMORY, HazardKind.THREAD
HOST_TENSOR, BAKED, STATE = HazardKind.HOST_TENSOR, HazardKind.BAKED_NUMBER, HazardKind.STATE
GENERATOR, CONTROL_FLOW = HazardKind.GENERATOR, HazardKind.CONTROL_FLOW

SCALAR = "aten._local_scalar_dense.default"
READ = "reads a value of the iteration on the host"
SHAPED = "returns a tensor whose shape depends on values"
GENERATED = "reads or sets the state of a random generator"
ON_DEVICE = "keep the value on the device"
ON_A_GPU = "pageable host memory"
MAKE = "make it on the device"


@refused(HOST_READ, SCALAR, READ)
def item(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.sum().item()  # refused


@refused(HOST_READ, SCALAR, READ)
def behind_writes_that_overlap(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate[2:].mul_(2)
    self.gate.add_(torch.rand(4, device=x.device))
    self.gate[0] = 7
    return h * int(x[0, 0])  # refused


@refused(HOST_READ, SCALAR, READ)
def branch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:  # refused
        return h * 2
    return h


@refused(HOST_READ, "aten.equal.default", READ)
def equal(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.equal(h, x)  # refused


@refused(HOST_READ, "aten.allclose.default", READ)
def allclose(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.allclose(h, x)  # refused


@refused(HOST_READ, "Tensor.tolist", READ)
def tolist(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(x.tolist()[0][0])  # refused


@refused(HOST_READ, "Tensor.cpu", READ)
def cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().cpu().max().to(h.device)  # refused


@refused(HOST_READ, r"Tensor.to\('cpu'\)", READ)
def to_cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to("cpu").max().to(h.device)  # refused


@refused(HOST_READ, r"Tensor.to\('cpu'\)", READ)
def to_device_keyword(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to(device="cpu").max().to(h.device)  # refused


@refused(HOST_READ, "Tensor.numpy", READ, cpu_only=True)
def to_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(x.numpy()[0, 0])  # refused


@refused(HOST_READ, "Tensor.__array__", READ, cpu_only=True)
def numpy_function(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(numpy.asarray(x)[0, 0])  # refused


@refused(HIDDEN_WRITE, "Tensor.apply_", "runs a Python function on every element", cpu_only=True)
def applied_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * x.clone().apply_(lambda value: value + 1)  # refused


@refused(HIDDEN_WRITE, "Tensor.map_", "runs a Python function on every element", cpu_only=True)
def mapped_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * x.clone().map_(h.detach(), lambda left, right: left + right)  # refused


@refused(HOST_READ, "torch.tensor", READ)
def literal_of_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.tensor([x[0, 0], x[0, 1]], device=h.device).sum()  # refused


@refused(HOST_READ, "torch.as_tensor", READ)
def literal_of_nested_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.as_tensor([[1.0, x[0, 0]]], device=h.device).sum()  # refused


@refused(HOST_READ, "Tensor.new_tensor", READ)
def new_tensor_of_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.new_tensor([x[0, 0]])  # refused


@refused(HOST_READ, "Tensor.__getitem__", READ)
def list_of_indices(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[:, [x[0].argmax(), 0]]  # refused


@refused(HOST_READ, "Tensor.tolist", READ, module=None)
def read_in_a_hook(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * grad.tolist()[0][0])  # refused
    return h


@refused(HOST_READ, "torch.tensor", READ, module=None)
def read_in_a_backward(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: Tensor) -> Tensor:
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            device = grads[0].device
            return grads[0] * torch.tensor([grads[0].abs().max()], device=device)  # refused

    out: Tensor = Reads.apply(h)  # type: ignore[no-untyped-call]
    return out


@refused(HOST_READ, "Tensor.tolist", READ)
def read_in_an_inner_gradient(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    inner = x.clone().requires_grad_()
    inner.register_hook(lambda grad: grad * grad.tolist()[0][0])  # refused
    (slope,) = torch.autograd.grad((inner * inner).sum(), inner)
    return h * slope


@refused(HOST_READ, SCALAR, READ)
def swallowed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    try:
        return h * h.sum().item()  # refused
    except Exception:
        return h * h.sum()


@refused(HOST_READ, "Tensor.tolist", READ)
def swallowed_with_another_one(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with suppress(CaptureError):
        x.tolist()  # refused
    with suppress(CaptureError):
        h.sum().item()
    return h


@refused(HOST_READ, SCALAR, READ)
def turned_into_another_error(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    try:
        return h * x.sum().item()  # refused
    except CaptureError as error:
        raise RuntimeError("something went wrong") from error


@refused(HOST_READ, SCALAR, READ, cpu_only=True)
def constant_that_was_written(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(4)
    total += h.detach().mean(dim=0)
    return h * total[0].item()  # refused


@refused(HOST_READ, SCALAR, READ, cpu_only=True)
def constant_of_which_a_view_was_written(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(4)
    total[2:].copy_(h.detach()[0, :2])
    return h * float(total[3])  # refused


@refused(SHAPE, "aten._ctc_loss.Tensor", SHAPED, cpu_only=True)
def target_lengths_of_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    lengths = (x[:1, 0] > 0).long() + 1
    scores = h.unsqueeze(1).log_softmax(dim=-1)
    targets = torch.tensor([[1, 2]])
    return functional.ctc_loss(scores, targets, torch.tensor([8]), lengths)  # refused


@refused(HOST_READ, "tensor_split", READ, cpu_only=True)
def split_at_a_tensor(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.tensor_split((x[0] > 0).sum().view(1), dim=1)[0]  # refused


@refused(SHAPE, "aten._pack_padded_sequence.default", SHAPED, cpu_only=True)
def packed_by_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    lengths = torch.stack([(x[0] > 0).sum(), (x[0] * 0).sum().long()]) + 4
    return pack_padded_sequence(h.view(2, 4, 4).repeat(1, 2, 1), lengths, True).data  # refused


@refused(
    GENERATOR,
    "aten.rand.generator",
    "draws from a random generator that is as new",
    cpu_only=True,
    by="capture",
)
def new_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(4, generator=torch.Generator())  # refused


@refused(HOST_READ, "Tensor.__repr__", READ)
def printed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    print(h)  # refused
    return h


@refused(HOST_READ, "Tensor.__format__", READ)
def formatted(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    text = f"{h.sum():.3f}"  # refused
    return h * len(text)


@refused(SHAPE, "aten.nonzero.default", SHAPED)
def nonzero(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.nonzero(x[:, 0] > 0).flatten()]  # refused


@refused(SHAPE, "aten.index.Tensor", SHAPED)
def boolean_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[x > 0]  # refused


@refused(SHAPE, "aten.index_put_.default", SHAPED)
def values_under_a_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[x[:, 0] > 0] = x.mean(dim=0)  # refused
    return h


@refused(SHAPE, r"aten\._?unique.*", SHAPED)
def unique(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.mul(torch.unique(x.round()).sum())  # refused


@refused(SHAPE, r"aten.repeat_interleave.*", SHAPED)
def repeat_interleave(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return torch.repeat_interleave(h, (x[:, 0] > 0).long() + 1, dim=0)  # refused


@refused(HOST_READ, SCALAR, READ)
def one_hot_of_unknown_width(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * functional.one_hot((x[:, 0] > 0).long()).sum()  # refused


@refused(GENERATOR, "torch.Generator.get_state", GENERATED, driver=False)
def get_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.get_rng_state()  # refused
    return h


@refused(GENERATOR, "torch.Generator.get_state", GENERATED, cpu_only=True, module=None)
def generator_in_a_hook(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * torch.get_rng_state()[0])  # refused
    return h


@refused(GENERATOR, "torch.Generator.set_state", GENERATED, driver=False)
def set_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.set_rng_state(RNG_STATE)  # refused
    return h


@refused(GENERATOR, "torch.Generator.manual_seed", GENERATED, driver=False)
def seed_own_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    OWN.manual_seed(3)  # refused
    return h


@refused(
    GENERATOR,
    "torch.Generator.get_state",
    GENERATED,
    "call graphfsdp.recompute, or",
    driver=False,
)
def checkpointed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    out = checkpoint(torch.sin, h, use_reentrant=False, context_fn=keeps)  # refused
    assert isinstance(out, Tensor)
    return out


@refused(
    MEMORY,
    "aten.resize_.default",
    "grows a storage inside the iteration",
    cpu_only=True,
    by="capture",
)
def grown_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    buffer = torch.empty(2)
    buffer.resize_(4).copy_(h[0].detach())  # refused
    return h * buffer


@refused(MEMORY, r".*", "layout torch.sparse_coo has no storage", driver=False)
def sparse(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    indices = torch.zeros(1, 8, dtype=torch.int64, device=h.device)
    shape = (1, 4)
    matrix = torch.sparse_coo_tensor(indices, h.detach(), shape, check_invariants=False)  # refused
    return h * torch.sparse.sum(matrix)


@refused(
    HIDDEN_WRITE,
    "graphfsdp_programs.silent_add.default",
    "(a torch.float32 tensor of shape (4,)) without saying so in its schema",
    cpu_only=True,
    by="capture",
)
def written_in_secret(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    shift: Tensor = torch.ops.graphfsdp_programs.silent_add(self.gate, x[0])  # refused
    return h * shift


LIBRARY = torch.library.Library("graphfsdp_programs", "FRAGMENT")
LIBRARY.define("silent_add(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("silent_add", lambda x, y: x.add_(y).clone(), "CompositeExplicitAutograd")


@misbehaves(HOST_READ, "Tensor.__float__", READ, ON_DEVICE)
def legacy_constructor(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.Tensor([x[0, 0], x[0, 1]]).sum()  # refused


@misbehaves(HOST_READ, SCALAR, READ, ON_DEVICE)
def list_of_tensors_that_is_read_back(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    history: list[Tensor] = vars(self).setdefault("history", [])
    history.append(h.detach().sum())
    return h * float(sum(history[-2:]))  # refused


@misbehaves(HOST_READ, SCALAR, READ, ON_DEVICE)
def gradient_that_is_read(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h.register_hook(lambda grad: grad * float(grad.abs().max() > 1e9))  # refused
    return h


@misbehaves(HIDDEN_WRITE, "Tensor.data_ptr", "hands out an address", "custom_op")
def written_by_ctypes(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    out = torch.ones(4)
    ctypes.memset(out.data_ptr(), 0, 8)  # refused
    return h * out


@misbehaves(HIDDEN_WRITE, "torch.UntypedStorage.data_ptr", "address", "custom_op")
def address_of_a_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h + float(h.untyped_storage().data_ptr() == 0)  # refused


@misbehaves(MEMORY, "torch.UntypedStorage.resize_", "below all", "full size")
def freed_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    kept = h.detach().clone()
    kept.untyped_storage().resize_(0)  # refused
    return h


@misbehaves(THREAD, "threading.Thread.start", "another Python thread", "outside")
def work_on_a_thread(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    thread = threading.Thread(target=x.tolist)
    thread.start()  # refused
    thread.join()
    return h


@misbehaves(THREAD, "ThreadPoolExecutor.submit", "another Python thread", "outside")
def work_on_a_pool(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        scale = pool.submit(lambda: float(x[0, 0])).result()  # refused
    return h * scale


@misbehaves(BAKED, "random.Random.random", "runs no Python", "torch.rand")
def layer_drop(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if random.random() < 0.5 else h  # refused


@misbehaves(BAKED, "random.Random.getrandbits", "runs no Python", "torch.rand")
def shuffled_by_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    order = random.Random(3)
    return h[:, order.choice([0, 1]) :].sum(dim=1, keepdim=True) * h  # refused


@misbehaves(HazardKind.RECOMPUTE, r"aten\.bernoulli_?\..*", "second draw", "graphfsdp.recompute")
def dropout_that_is_recomputed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    def dropped(h: Tensor) -> Tensor:
        return nn.functional.dropout(h.sin(), 0.5)  # refused

    out = checkpoint(dropped, h, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out, Tensor)
    return out


@refused(STATE, None, "replaced 'body.inner.gate'", "in place (copy_", has_line=False, driver=False)
def replaced_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate = self.gate * 0.9 + h.detach().mean(dim=0)  # refused
    return h * self.gate


@refused(STATE, None, "replaced 'body.inner.attribute'", "copy_", has_line=False, driver=False)
def replaced_attribute(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.attribute = self.attribute * 0.9 + h.detach().mean(dim=0)  # refused
    return h * self.attribute


@refused(CONTROL_FLOW, "cond", "higher-order operator", "torch.where", by="capture", cpu_only=True)
def higher_order(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    branches = (lambda h: h * 2, torch.clone)
    out: Tensor = torch.ops.higher_order.cond(x.sum() > 0, *branches, (h.detach(),))  # refused
    return h + out


@misbehaves(STATE, None, "gave 'body.inner.gate' new", "in place", has_line=False)
def replaced_data(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate.data = self.gate * 0.9  # refused
    return h * self.gate


@misbehaves(STATE, None, "then dropped it", "in place")
def replaced_closure(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    out = h + AVERAGE[0]  # refused
    AVERAGE[0] = 0.5 * AVERAGE[0] + h.detach().mean(dim=0)
    return out


@misbehaves(BAKED, "aten.mul.Tensor", "in the next one", "in a tensor", by="check")
def python_counter(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    count: int = vars(self).get("count", 0) + 1
    vars(self)["count"] = count
    return h * count  # refused


@misbehaves(BAKED, "aten.add.Tensor", "next one", "in a tensor", by="check")
def clock(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h + time.perf_counter()  # refused


@misbehaves(BAKED, "random.SystemRandom.getrandbits", "draws from a generator", "torch.rand")
def numpy_randomness(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(numpy.random.default_rng().random())  # refused


@misbehaves(CONTROL_FLOW, "aten..*", "one path for ever", "torch.where", by="check")
def alternating_branch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    turn: int = vars(self).get("turn", 0) + 1
    vars(self)["turn"] = turn
    return h.sin() if turn % 2 else h.cos()  # refused


@misbehaves(BAKED, None, "moves Python", "in place", by="check")
def written_by_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    SHARED[1][:] += 1
    return h * SHARED[0]  # refused


@misbehaves(BAKED, "aten.mul.Tensor", "in the next one", "in a tensor", by="check")
def read_by_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    SHARED[0].add_(1)
    return h * float(SHARED[1][0])  # refused


@misbehaves(HOST_TENSOR, "torch.tensor", ON_A_GPU, MAKE, by="check")
def literal_on_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)  # refused


@misbehaves(HOST_TENSOR, "Tensor.to", ON_A_GPU, MAKE, by="check")
def moved_to_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.ones(4).mul(2).to(x.device)  # refused


@misbehaves(HOST_TENSOR, "aten.index.Tensor", ON_A_GPU, MAKE, by="check")
def index_in_host_memory(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.arange(7, -1, -1)]  # refused


@misbehaves(HOST_TENSOR, "aten.mul.Tensor", ON_A_GPU, MAKE, by="check")
def array_of_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.from_numpy(numpy.ones(4, dtype=numpy.float32))  # refused


@misbehaves(BAKED, "aten.mul.Tensor", "drawn in host", "device=", by="check")
def number_drawn_in_host_memory(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(())  # refused


@misbehaves(HOST_READ, SCALAR, READ, "", by="check")
def constant_of_the_device(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(torch.ones(3, device=x.device).sum())  # refused


RNG_STATE = torch.get_rng_state()
OWN = torch.Generator()
AVERAGE = [torch.zeros(4)]
_MEMORY = torch.ones(4)
SHARED = (_MEMORY, _MEMORY.numpy())
