"""Programs that a capture refuses, each with the name and the reason it is refused by."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

from probe import Inner, Program


@dataclass(frozen=True)
class Rule:
    """A program that must be refused; its line is marked ``# refused``.

    Attributes:
        program: The program.
        op: Pattern of the name of the operation.
        message: Part of the reason.
        cpu_only: On CUDA it is legal, or fails before it reaches a capture.
        driver: CUDA refuses it too, without our rules (tests/test_cuda_graph.py).
    """

    program: Program
    op: str
    message: str
    cpu_only: bool = False
    driver: bool = True


RULES: dict[str, Rule] = {}


def rule(
    op: str, message: str, *, cpu_only: bool = False, driver: bool = True
) -> Callable[[Program], Program]:
    def register(program: Program) -> Program:
        name = program.__name__
        RULES[name] = Rule(program, op, message, cpu_only, driver and not cpu_only)
        return program

    return register


SCALAR = "aten._local_scalar_dense.default"
HOST = "reads a value of the iteration on the host"
SHAPE = "returns a tensor whose shape depends on values"
GENERATOR = "reads or sets the state of a random generator"


@rule(SCALAR, HOST)
def item(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.sum().item()  # refused


@rule(SCALAR, HOST)
def float_of_a_buffer(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(self.gate[0])  # refused


@rule(SCALAR, HOST)
def int_of_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * int(x[0, 0])  # refused


@rule(SCALAR, HOST)
def branch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:  # refused
        return h * 2
    return h


@rule(SCALAR, HOST)
def assertion(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    assert h.isfinite().all()  # refused
    return h


@rule(SCALAR, HOST)
def membership(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * (7.0 in x)  # refused


@rule(SCALAR, HOST)
def math_function(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * math.sqrt(self.extra.detach().abs().sum())  # refused


@rule(SCALAR, HOST)
def index_by_tensor_as_number(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * [1.0, 2.0][x[0].argmax() % 2]  # refused


@rule(SCALAR, HOST)
def random_number(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    if torch.rand((), device=h.device).item() < 0.5:  # refused
        return h * 2
    return h


@rule("aten.equal.default", HOST)
def equal(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.equal(h, x)  # refused


@rule("aten.allclose.default", HOST)
def allclose(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.allclose(h, x)  # refused


@rule("Tensor.tolist", HOST)
def tolist(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(x.tolist()[0][0])  # refused


@rule("Tensor.cpu", HOST)
def cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().cpu().max().to(h.device)  # refused


@rule(r"Tensor.to\('cpu'\)", HOST)
def to_cpu(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to("cpu").max().to(h.device)  # refused


@rule(r"Tensor.to\('cpu'\)", HOST)
def to_device_keyword(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.detach().to(device="cpu").max().to(h.device)  # refused


@rule("Tensor.numpy", HOST, cpu_only=True)
def to_numpy(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(x.numpy()[0, 0])  # refused


@rule("Tensor.__array__", HOST, cpu_only=True)
def numpy_function(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * float(numpy.asarray(x)[0, 0])  # refused


@rule("Tensor.apply_", "runs a Python function on every element", cpu_only=True)
def applied_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * x.clone().apply_(lambda value: value + 1)  # refused


@rule("Tensor.map_", "runs a Python function on every element", cpu_only=True)
def mapped_python(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * x.clone().map_(h.detach(), lambda left, right: left + right)  # refused


@rule("torch.tensor", HOST)
def literal_of_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.tensor([x[0, 0], x[0, 1]], device=h.device).sum()  # refused


@rule("torch.as_tensor", HOST)
def literal_of_nested_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.as_tensor([[1.0, x[0, 0]]], device=h.device).sum()  # refused


@rule("Tensor.new_tensor", HOST)
def new_tensor_of_tensors(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * h.new_tensor([x[0, 0]])  # refused


@rule("Tensor.__getitem__", HOST)
def list_of_indices(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[:, [x[0].argmax(), 0]]  # refused


@rule("tensor_split", HOST, cpu_only=True)
def split_at_a_tensor(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.tensor_split((x[0] > 0).sum().view(1), dim=1)[0]  # refused


@rule("aten._pack_padded_sequence.default", SHAPE, cpu_only=True)
def packed_by_the_batch(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    lengths = torch.stack([(x[0] > 0).sum(), (x[0] * 0).sum().long()]) + 4
    return pack_padded_sequence(h.view(2, 4, 4).repeat(1, 2, 1), lengths, True).data  # refused


@rule("aten.rand.generator", "draws from a random generator that is as new", cpu_only=True)
def new_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(4, generator=torch.Generator())  # refused


@rule("torch.Generator.get_state", GENERATOR)
def forked_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    with torch.random.fork_rng():  # refused
        return h * torch.rand_like(h)


@rule("Tensor.__repr__", HOST)
def printed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    print(h)  # refused
    return h


@rule("Tensor.__format__", HOST)
def formatted(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    text = f"{h.sum():.3f}"  # refused
    return h * len(text)


@rule("aten.nonzero.default", SHAPE)
def nonzero(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.nonzero(x[:, 0] > 0).flatten()]  # refused


@rule("aten.nonzero.default", SHAPE)
def where_with_one_argument(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[torch.where(x[:, 0] > 0)]  # refused


@rule("aten.index.Tensor", SHAPE)
def boolean_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h[x > 0]  # refused


@rule("aten.masked_select.default", SHAPE)
def masked_select(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.masked_select(x > 0)  # refused


@rule("aten.index_put_.default", SHAPE)
def values_under_a_mask(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[x[:, 0] > 0] = x.mean(dim=0)  # refused
    return h


@rule(r"aten\._?unique.*", SHAPE)
def unique(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.mul(torch.unique(x.round()).sum())  # refused


@rule(r"aten.unique_consecutive.*", SHAPE)
def unique_consecutive(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h.mul(torch.unique_consecutive(x.round()).sum())  # refused


@rule(r"aten.repeat_interleave.*", SHAPE)
def repeat_interleave(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return torch.repeat_interleave(h, (x[:, 0] > 0).long() + 1, dim=0)  # refused


@rule(r"aten.bincount.*", SHAPE)
def bincount(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.bincount((x[:, 0] > 0).long()).sum()  # refused


@rule(SCALAR, HOST)
def one_hot_of_unknown_width(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    return h * functional.one_hot((x[:, 0] > 0).long()).sum()  # refused


@rule("torch.Generator.get_state", GENERATOR, driver=False)
def get_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.get_rng_state()  # refused
    return h


@rule("torch.Generator.manual_seed", GENERATOR, cpu_only=True)
def manual_seed(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(3)  # refused
    return h


@rule("torch.Generator.set_state", GENERATOR, driver=False)
def set_rng_state(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    torch.set_rng_state(STATE)  # refused
    return h


@rule("torch.Generator.manual_seed", GENERATOR, driver=False)
def seed_own_generator(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    OWN.manual_seed(3)  # refused
    return h


@rule("torch.Generator.get_state", GENERATOR)
def checkpoint(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    out = checkpoint(torch.sin, h, use_reentrant=False)  # refused
    assert isinstance(out, Tensor)
    return out


@rule("aten.resize_.default", "grows a storage inside the iteration", cpu_only=True)
def grown_storage(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    buffer = torch.empty(2)
    buffer.resize_(4).copy_(h[0].detach())  # refused
    return h * buffer


@rule(r".*", "layout torch.sparse_coo has no storage", driver=False)
def sparse(self: Inner, h: Tensor, x: Tensor) -> Tensor:
    indices = torch.zeros(1, 8, dtype=torch.int64, device=h.device)
    shape = (1, 4)
    matrix = torch.sparse_coo_tensor(indices, h.detach(), shape, check_invariants=False)  # refused
    return h * torch.sparse.sum(matrix)


STATE = torch.get_rng_state()
OWN = torch.Generator()
