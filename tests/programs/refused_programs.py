"""Programs in the middle of a forward pass that are refused, one for each way to a refusal.

The table says who refuses a program, by which kind of hazard, with which message and remedy, and
whether CUDA refuses it too. The line that is told is that of a lambda, or is marked ``# refused``.
"""

import random
import threading
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
from helpers import line_of
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
            capture cannot see: see the silent ones in test_allowed.py).
        cpu_only: On CUDA it is legal, or fails before it reaches a capture.
        driver: CUDA refuses it too, without our rules (test_cuda_graph.py), if it gets that far.
        target: Whose rules the check judges by.
        has_line: The diagnosis has the line; else only the module, or the name of the tensor.
        at: The function that has the line, if it is not the program.
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
    at: Callable[..., Any] | None = None
    keeps_state: bool = False
    module: str | None = "body.inner"

    @property
    def function(self) -> str:
        return (self.at or self.program).__name__

    @property
    def line(self) -> int:
        function: Any = self.at or self.program
        if self.function == "<lambda>":
            line: int = function.__code__.co_firstlineno
            return line
        return line_of(function, "# refused")


HOST_READ, STATE = HazardKind.HOST_READ, HazardKind.STATE
HIDDEN_WRITE, MEMORY, THREAD = HazardKind.HIDDEN_WRITE, HazardKind.MEMORY, HazardKind.THREAD
BAKED, GENERATOR, CONTROL_FLOW = (
    *(HazardKind.BAKED_NUMBER, HazardKind.GENERATOR, HazardKind.CONTROL_FLOW),
)

SCALAR = "aten._local_scalar_dense.default"
READ = "reads a value of the iteration on the host"


def reads(program: Program, op: str = SCALAR, **more: Any) -> Refused:
    return Refused(program, HOST_READ, op, READ, **more)


def shaped(program: Program, op: str, **more: Any) -> Refused:
    why = "returns a tensor whose shape depends on values"
    return Refused(program, HazardKind.DYNAMIC_SHAPE, op, why, **more)


def sets(program: Program, op: str, fix: str = "", **more: Any) -> Refused:
    why = "reads or sets the state of a random generator"
    return Refused(program, GENERATOR, f"torch.Generator.{op}", why, fix, driver=False, **more)


def writes(program: Program, op: str) -> Refused:
    why = "runs a Python function on every element"
    return Refused(program, HIDDEN_WRITE, op, why, cpu_only=True)


def replaces(program: Program, why: str) -> Refused:
    return Refused(program, STATE, None, why, "in place (copy_", has_line=False, driver=False)


# A known failure of the field: an opaque CUDA error, or a replay with old numbers and no error.
misbehaves = partial(Refused, cpu_only=True, target="cuda", keeps_state=True)
misbehaves_silently = partial(misbehaves, by="check")
on_recording = partial(Refused, cpu_only=True, by="capture")


def copies(program: Program, op: str) -> Refused:
    """Return a program that copies what lies in host memory to a GPU."""
    why, fix = "pageable host memory", "make it on the device"
    return misbehaves_silently(program, HazardKind.HOST_TENSOR, op, why, fix)


def in_backward(hook: Callable[[Tensor], Tensor], make: Any, *diagnosis: Any, **more: Any) -> Any:
    """Return a program with a hook of a gradient."""

    def program(self: Inner, h: Tensor, x: Tensor) -> Tensor:
        h.register_hook(hook)
        return h

    return make(program, *diagnosis, at=hook, **more)


def behind_writes_that_overlap(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate[2:].mul_(2)
    self.gate.add_(torch.rand(4, device=x.device))
    self.gate[0].fill_(7)
    return h * int(x[0, 0])  # refused


def read_in_an_inner_gradient(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    inner = x.clone().requires_grad_()
    inner.register_hook(lambda grad: grad * grad.tolist()[0][0])  # refused
    (slope,) = torch.autograd.grad((inner * inner).sum(), inner)
    return h * slope


def swallowed_with_another_one(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with suppress(CaptureError):
        x.tolist()  # refused
    with suppress(CaptureError):
        h.sum().item()
    return h


def turned_into_another_error(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    try:
        return h * x.sum().item()  # refused
    except CaptureError as error:
        raise RuntimeError("something went wrong") from error


def constant_of_which_a_view_was_written(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    total = torch.zeros(4)
    total[2:].copy_(h.detach()[0, :2])
    return h * float(total[3])  # refused


def target_lengths_of_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    lengths = (x[:1, 0] > 0).long() + 1
    scores = h.unsqueeze(1).log_softmax(dim=-1)
    targets = torch.tensor([[1, 2]])
    return functional.ctc_loss(scores, targets, torch.tensor([8]), lengths)  # refused


def packed_by_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    lengths = torch.stack([(x[0] > 0).sum(), (x[0] * 0).sum().long()]) + 4
    return pack_padded_sequence(h.view(2, 4, 4).repeat(1, 2, 1), lengths, True).data  # refused


def values_under_a_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[x[:, 0] > 0] = x.mean(dim=0)  # refused
    return h


def checkpointed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    out = checkpoint(torch.sin, h, use_reentrant=False, context_fn=keeps)  # refused
    assert isinstance(out, Tensor)
    return out


def grown_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    buffer = torch.empty(2)
    buffer.resize_(4).copy_(h[0].detach())  # refused
    return h * buffer


def sparse(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    indices = torch.zeros(1, 8, dtype=torch.int64, device=h.device)
    shape = (1, 4)
    matrix = torch.sparse_coo_tensor(indices, h.detach(), shape, check_invariants=False)  # refused
    return h * torch.sparse.sum(matrix)


LIBRARY = torch.library.Library("graphfsdp_programs", "FRAGMENT")
LIBRARY.define("silent_add(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("silent_add", lambda x, y: x.add_(y).clone(), "CompositeExplicitAutograd")


def freed_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    kept = h.detach().clone()
    kept.untyped_storage().resize_(0)  # refused
    return h


def work_on_a_thread(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    thread = threading.Thread(target=x.tolist)
    thread.start()  # refused
    thread.join()
    return h


def work_on_a_pool(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        scale = pool.submit(lambda: float(x[0, 0])).result()  # refused
    return h * scale


def dropout_that_is_recomputed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    def dropped(h: Tensor) -> Tensor:
        return nn.functional.dropout(h.sin(), 0.5)  # refused

    out = checkpoint(dropped, h, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(out, Tensor)
    return out


def replaced_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate = self.gate * 0.9 + h.detach().mean(dim=0)
    return h * self.gate


def replaced_attribute(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.attribute = self.attribute * 0.9 + h.detach().mean(dim=0)
    return h * self.attribute


def replaced_data(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    self.gate.data = self.gate * 0.9
    return h * self.gate


def replaced_closure(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    out = h + AVERAGE[0]  # refused
    AVERAGE[0] = 0.5 * AVERAGE[0] + h.detach().mean(dim=0)
    return out


def higher_order(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    branches = (lambda h: h * 2, torch.clone)
    out: Tensor = torch.ops.higher_order.cond(x.sum() > 0, *branches, (h.detach(),))  # refused
    return h + out


def written_by_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    SHARED[1][:] += 1
    return h * SHARED[0]  # refused


OWN = torch.Generator()
HELD = OWN.get_state()
AVERAGE = [torch.zeros(4)]
_MEMORY = torch.ones(4)
SHARED = (_MEMORY, _MEMORY.numpy())

REFUSED: dict[str, Refused] = {
    # Operators that read, by torch's tags.
    "item": reads(lambda self, h, x: h * h.sum().item()),
    "behind_writes_that_overlap": reads(behind_writes_that_overlap),
    "constant_of_which_a_view_was_written": reads(
        constant_of_which_a_view_was_written, cpu_only=True
    ),
    "constant_of_the_device": misbehaves_silently(
        lambda self, h, x: h * float(torch.ones(3, device=x.device).sum()), HOST_READ, SCALAR, READ
    ),
    "nonzero": shaped(
        lambda self, h, x: h[torch.nonzero(x[:, 0] > 0).flatten()], "aten.nonzero.default"
    ),
    "boolean_mask": shaped(lambda self, h, x: h[x > 0], "aten.index.Tensor"),
    "values_under_a_mask": shaped(values_under_a_mask, "aten.index_put_.default"),
    "repeat_interleave": shaped(
        lambda self, h, x: torch.repeat_interleave(h, (x[:, 0] > 0).long() + 1, dim=0),
        r"aten.repeat_interleave.*",
    ),
    "target_lengths_of_the_batch": shaped(
        target_lengths_of_the_batch, "aten._ctc_loss.Tensor", cpu_only=True
    ),
    "packed_by_the_batch": shaped(
        packed_by_the_batch, "aten._pack_padded_sequence.default", cpu_only=True
    ),
    # Functions of torch that read, or run Python.
    "cpu": reads(lambda self, h, x: h * h.detach().cpu().max().to(h.device), "Tensor.cpu"),
    "to_cpu": reads(
        lambda self, h, x: h * h.detach().to("cpu").max().to(h.device), r"Tensor.to\('cpu'\)"
    ),
    "to_numpy": reads(lambda self, h, x: h * float(x.numpy()[0, 0]), "Tensor.numpy", cpu_only=True),
    "numpy_function": reads(
        lambda self, h, x: h * float(numpy.asarray(x)[0, 0]), "Tensor.__array__", cpu_only=True
    ),
    "printed": reads(lambda self, h, x: h * len(repr(h)), "Tensor.__repr__"),
    "formatted": reads(lambda self, h, x: h * len(f"{h.sum():.3f}"), "Tensor.__format__"),
    "literal_of_nested_tensors": reads(
        lambda self, h, x: h * torch.as_tensor([[1.0, x[0, 0]]], device=h.device).sum(),
        "torch.as_tensor",
    ),
    "new_tensor_of_tensors": reads(
        lambda self, h, x: h * h.new_tensor([x[0, 0]]), "Tensor.new_tensor"
    ),
    "list_of_indices": reads(lambda self, h, x: h[:, [x[0].argmax(), 0]], "Tensor.__getitem__"),
    "split_at_a_tensor": reads(
        lambda self, h, x: h.tensor_split((x[0] > 0).sum().view(1), dim=1)[0],
        "tensor_split",
        cpu_only=True,
    ),
    "legacy_constructor": misbehaves(
        lambda self, h, x: h * torch.Tensor([x[0, 0], x[0, 1]]).sum(),
        *(HOST_READ, "Tensor.__float__", READ, "keep the value on the device"),
    ),
    "applied": writes(lambda self, h, x: h * x.clone().apply_(lambda _: 1), "Tensor.apply_"),
    "mapped": writes(lambda self, h, x: h * x.clone().map_(x, lambda *_: 1), "Tensor.map_"),
    # In backward passes, and behind handlers of exceptions.
    "literal_in_a_hook": in_backward(
        lambda grad: grad * torch.tensor([grad.abs().max()], device=grad.device),
        *(reads, "torch.tensor"),
        module=None,
    ),
    "gradient_that_is_read": in_backward(
        lambda grad: grad * float(grad.abs().max() > 1e9), misbehaves, HOST_READ, SCALAR, READ
    ),
    "generator_in_a_hook": in_backward(
        lambda grad: grad * len(torch.get_rng_state()),
        sets,
        "get_state",
        cpu_only=True,
        module=None,
    ),
    "read_in_an_inner_gradient": reads(read_in_an_inner_gradient, "Tensor.tolist"),
    "swallowed_with_another_one": reads(swallowed_with_another_one, "Tensor.tolist"),
    "turned_into_another_error": reads(turned_into_another_error),
    # Random numbers.
    "get_rng_state": sets(lambda self, h, x: h * len(torch.get_rng_state()), "get_state"),
    "state_of_its_own": sets(
        lambda self, h, x: h * OWN.set_state(HELD).initial_seed(), "set_state"
    ),
    "seed_of_its_own": sets(
        lambda self, h, x: h * OWN.manual_seed(3).initial_seed(), "manual_seed"
    ),
    "checkpointed": sets(checkpointed, "get_state", "call graphfsdp.recompute, or"),
    "new_generator": on_recording(
        lambda self, h, x: h * torch.rand(4, generator=torch.Generator()),
        *(GENERATOR, "aten.rand.generator", "draws from a random generator that is as new"),
    ),
    "dropout_that_is_recomputed": misbehaves(
        dropout_that_is_recomputed,
        *(HazardKind.RECOMPUTE, r"aten\.bernoulli_?\..*", "second draw", "graphfsdp.recompute"),
    ),
    "layer_drop": misbehaves(
        lambda self, h, x: h * 2 if random.random() < 0.5 else h,
        *(BAKED, "random.Random.random", "draws from a generator of Python", "torch.rand"),
    ),
    "number_drawn_in_host_memory": misbehaves_silently(
        lambda self, h, x: h * torch.rand(()), BAKED, "aten.mul.Tensor", "drawn in host", "device="
    ),
    # Memory, and writes that nobody tells of.
    "grown_storage": on_recording(
        grown_storage, MEMORY, "aten.resize_.default", "grows a storage inside the iteration"
    ),
    "freed_storage": misbehaves(
        freed_storage, MEMORY, "torch.UntypedStorage.resize_", "below all", "full size"
    ),
    "sparse": Refused(
        sparse, MEMORY, r".*", "layout torch.sparse_coo has no storage", driver=False
    ),
    "written_in_secret": on_recording(
        lambda self, h, x: h * torch.ops.graphfsdp_programs.silent_add(self.gate, x[0]),
        *(HIDDEN_WRITE, "graphfsdp_programs.silent_add.default"),
        "(a torch.float32 tensor of shape (4,)) without saying so in its schema",
    ),
    "address_of_a_tensor": misbehaves(
        lambda self, h, x: h + float(h.data_ptr() == 0),
        *(HIDDEN_WRITE, "Tensor.data_ptr", "hands out an address", "custom_op"),
    ),
    "address_of_a_storage": misbehaves(
        lambda self, h, x: h + float(h.untyped_storage().data_ptr() == 0),
        *(HIDDEN_WRITE, "torch.UntypedStorage.data_ptr", "address", "custom_op"),
    ),
    "literal_on_the_device": copies(
        lambda self, h, x: h * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), "torch.tensor"
    ),
    "moved_to_the_device": copies(
        lambda self, h, x: h * torch.ones(4).mul(2).to(x.device), "Tensor.to"
    ),
    "index_in_host_memory": copies(
        lambda self, h, x: h[torch.arange(7, -1, -1)], "aten.index.Tensor"
    ),
    "array_of_numpy": copies(
        lambda self, h, x: h * torch.from_numpy(numpy.ones(4, dtype=numpy.float32)),
        "aten.mul.Tensor",
    ),
    "shapes_that_do_not_fit": misbehaves_silently(
        lambda self, h, x: h @ torch.ones(3, 3),
        *(HazardKind.EXCEPTION, "RuntimeError", "raises RuntimeError"),
    ),
    # State that Python moves, and what Python decides.
    "replaced_buffer": replaces(replaced_buffer, "replaced 'body.inner.gate'"),
    "replaced_attribute": replaces(replaced_attribute, "replaced 'body.inner.attribute'"),
    "replaced_data": misbehaves(
        replaced_data, STATE, None, "gave 'body.inner.gate' new", "in place", has_line=False
    ),
    "replaced_closure": misbehaves(replaced_closure, STATE, None, "then dropped it", "in place"),
    "higher_order": on_recording(
        higher_order, CONTROL_FLOW, "cond", "higher-order operator", "torch.where"
    ),
    "work_on_a_thread": misbehaves(
        work_on_a_thread, THREAD, "threading.Thread.start", "another Python thread", "outside"
    ),
    "work_on_a_pool": misbehaves(
        work_on_a_pool, THREAD, "ThreadPoolExecutor.submit", "another Python thread", "outside"
    ),
    "written_by_numpy": misbehaves_silently(
        written_by_numpy, BAKED, None, "moves Python", "in place"
    ),
}
