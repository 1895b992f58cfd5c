"""What a capture may not do: reasons and remedies, and the judgement of operators and functions.

One place for both backends. The CUDA column of the graph contract is enforced by the driver too
(errors 900 to 908); these rules speak first, and in names.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from graphfsdp._capture.trace.source import called_by_user, frames
from graphfsdp.base.op_tensors import OpCall, flat_tensors
from graphfsdp.base.torch_internals import CUMPROD_READS, OpOverload, is_in_backward, schema_of
from graphfsdp.errors import HazardKind

Varies = Callable[[Tensor], bool]  # whether its contents differ from replay to replay

# Numbers of the CUDA errors that a capture would end in (cuda_errors.py has their meaning).
UNSUPPORTED = 900
UNJOINED = 904
ISOLATION = 905


@dataclass(frozen=True)
class Refusal:
    """Why a graph cannot hold an operation, and what to do.

    Attributes:
        what: What the operation does, and why a graph cannot hold it; ``{}`` stands for its name.
        cuda_error: Number of the CUDA error that it causes, None if it causes none.
    """

    what: str
    remedy: str
    kind: HazardKind
    cuda_error: int | None = None

    def of(self, name: object) -> "Refusal":
        return dataclasses.replace(self, what=self.what.format(name))

    @property
    def message(self) -> str:
        return f"{self.what}. Remedy: {self.remedy}"


Judged = tuple[str, Refusal] | None  # the name of what was called, and why not


class _LibraryModule(NamedTuple):
    """A library's module that is known to do what is refused, and what its users can do."""

    module: str
    kind: HazardKind
    what: str
    remedy: str


_LIBRARY_MODULES = (
    _LibraryModule(
        "torch.distributions",
        HazardKind.HOST_READ,
        "torch.distributions looks on the host whether its arguments are valid; a replay would "
        "look no more",
        "validate_args=False for this distribution, or, before the loop, "
        "torch.distributions.Distribution.set_default_validate_args(False)",
    ),
    _LibraryModule(
        "torch.nn.modules.transformer",
        HazardKind.HOST_READ,
        "torch's transformer layers look on the host whether their mask is a causal one; a replay "
        "would look no more",
        "tgt_is_causal=True or False beside tgt_mask (is_causal= beside the mask of an encoder), "
        "which spares the look",
    ),
    _LibraryModule(
        "torch.amp.grad_scaler",
        HazardKind.HOST_READ,
        "torch's GradScaler decides on the host whether an optimizer steps; a replay would go on "
        "with the answer for this iteration",
        "bfloat16, which needs no scale, and capture(..., skip_nonfinite=True) where a step may be "
        "left out; graphfsdp.capture_in_place leaves the scaler as it is",
    ),
    _LibraryModule(
        "ema_pytorch",
        HazardKind.HOST_READ,
        "ema-pytorch looks on the host at which step it is; a replay would go on with the answer "
        "for this iteration",
        "ema.update() after each call of the captured step, outside the iteration: it sees what "
        "the step has trained",
    ),
    _LibraryModule(
        "torch_geometric.utils",
        HazardKind.DYNAMIC_SHAPE,
        "torch_geometric looks in each iteration which edges are loops, so that the number of "
        "edges depends on values; a graph's shapes are fixed",
        "edge_index, _ = torch_geometric.utils.add_remaining_self_loops(edge_index, "
        "num_nodes=...) once, outside the iteration, and layers with add_self_loops=False",
    ),
)
HOST_READ = Refusal(
    "{} reads a value of the iteration on the host; a replay runs recorded kernels and no Python, "
    "so every later iteration would go on with the value of this one",
    "keep the value on the device (torch.where instead of `if`, a 0-D tensor instead of a "
    "number), or move the read outside the captured iteration",
    HazardKind.HOST_READ,
    UNSUPPORTED,
)
READ_IN_A_LIST = dataclasses.replace(
    HOST_READ,
    remedy="torch.stack or torch.cat for tensors; make an index or a literal from numbers that "
    "never change, or outside the iteration",
)
HOST_WAIT = Refusal(
    "{} makes the host ask or wait for the device inside the iteration; CUDA does not permit that "
    "during a capture, and a replay runs no Python",
    "order streams among themselves (wait_stream, wait_event), and time or wait outside the "
    "iteration",
    HazardKind.SYNCHRONIZE,
    UNSUPPORTED,
)
HOST_WRITE = Refusal(
    "{} runs a Python function on every element, which a replay would leave out",
    "write it with tensor operations",
    HazardKind.HIDDEN_WRITE,
)
RAW_ADDRESS = Refusal(
    "{} hands out an address; what is read or written through it (ctypes, NumPy, a C library) is "
    "in no recording, and in a replay intermediate tensors lie elsewhere",
    "make the code an operator that declares what it writes (torch.library.custom_op)",
    HazardKind.HIDDEN_WRITE,
)
NO_STORAGE = Refusal(
    "a tensor of layout {} has no storage that a graph could hold at a fixed address",
    "use strided (dense) tensors inside the iteration",
    HazardKind.MEMORY,
)
RESIZED_STORAGE = Refusal(
    "{} gives memory back or takes new memory inside the iteration, below all operators; a "
    "graph's addresses are fixed, so a replay would use freed memory",
    "keep the storage at its full size (graphfsdp.fully_shard frees by letting go)",
    HazardKind.MEMORY,
)
GENERATOR_STATE = Refusal(
    "{} reads or sets the state of a random generator inside the iteration; a replay advances the "
    "generator by itself and never runs this Python",
    "set the state before the loop; in place of torch.utils.checkpoint call graphfsdp.recompute, "
    "or pass it preserve_rng_state=False and context_fn=graphfsdp.recompute_contexts",
    HazardKind.GENERATOR,
)
NEW_GENERATOR = Refusal(
    "{} draws from a random generator that is as new; if the iteration makes it, eager would "
    "start it anew each time, and a replay goes on drawing from one",
    "make the generator before the loop, and seed it",
    HazardKind.GENERATOR,
)
PYTHON_RANDOM = Refusal(
    "{} draws from a generator of Python inside the iteration; a replay runs no Python, so this "
    "one number, or the branch that it decides, would stay for ever",
    "draw on the device (torch.rand), or draw outside and pass the number as a tensor of the batch",
    HazardKind.BAKED_NUMBER,
)
SCHEDULER = Refusal(
    "{} counts in Python and sets learning rates inside the iteration; a replay runs no Python, "
    "so the schedule would stand still",
    "call it after the captured step, outside the iteration: replays see the learning rates that "
    "it sets",
    HazardKind.BAKED_NUMBER,
)
THREAD = Refusal(
    "{} hands work to another Python thread inside the iteration; a recording follows one thread, "
    "so what the other one computes or reads is missing from every replay",
    "do it on the thread of the iteration, or outside the iteration",
    HazardKind.THREAD,
)
COMPILED = Refusal(
    "{} is compiled by torch.compile; its kernels are invisible to a recording on a CPU and would "
    "be missing from every replay",
    "capture the uncompiled module on a CPU (on CUDA compiled kernels are recorded)",
    HazardKind.COMPILED,
)
HIGHER_ORDER = Refusal(
    "{} is a higher-order operator; which of its functions runs is decided in Python",
    "write it with tensor operations, such as torch.where on both results",
    HazardKind.CONTROL_FLOW,
    UNSUPPORTED,
)
OBJECT_COLLECTIVE = Refusal(
    "{} sends Python objects between ranks inside the iteration; it reads lengths on the host, and "
    "a replay runs no Python that could send new ones",
    "exchange tensors of fixed shape (functional collectives), or do it outside the iteration",
    HazardKind.COLLECTIVE,
    UNSUPPORTED,
)
SECRET_COLLECTIVE = Refusal(
    "{} is a collective that writes tensors without saying so in its schema",
    "use functional collectives (torch.distributed._functional_collectives) or run the collective "
    "outside the captured iteration",
    HazardKind.COLLECTIVE,
)
PAGEABLE_COPY = Refusal(
    "{} copies a tensor from pageable host memory to the device inside the iteration; CUDA does "
    "not permit that during a capture (error 900), and a replay would repeat the old contents",
    "make the tensor on the device (device=x.device), or before the iteration",
    HazardKind.HOST_TENSOR,
    UNSUPPORTED,
)
HOST_SCALAR = Refusal(
    "{} reads a 0-D CPU tensor beside CUDA tensors; its value is baked into the kernel's "
    "arguments and later changes never reach a replay",
    "keep the scalar on the device (tensor.to(device) before the loop)",
    HazardKind.BAKED_NUMBER,
)
DYNAMIC_SHAPE = Refusal(
    "{} returns a tensor whose shape depends on values; a graph's shapes are fixed",
    "use a fixed-shape form: multiply by the mask or torch.where instead of boolean indexing, "
    "torch.topk or a padded capacity instead of nonzero, output_size= for repeat_interleave, "
    "index_add_ into zeros instead of bincount",
    HazardKind.DYNAMIC_SHAPE,
    UNSUPPORTED,
)
READING_GRADIENT = Refusal(
    "the gradient of {} is computed by reading values on the host, which a graph cannot hold "
    "(under a recording torch takes another formula, with other last bits)",
    "",
    HazardKind.GRADIENT,
    UNSUPPORTED,
)
RANDOM_RECOMPUTE = Refusal(
    "{} draws random numbers while activations are recomputed, without the generator being set "
    "back (which a graph cannot do): the second draw differs from the first, so gradients are "
    "wrong while the loss looks right",
    "call graphfsdp.recompute in place of torch.utils.checkpoint; it draws nothing twice",
    HazardKind.RECOMPUTE,
)

_WHERE = "torch.where(mask, value, x)"
# Operators whose gradient torch computes by reading values on the host: name, overload ("" for
# all), argument whose gradient it is, remedy.
# Under a dispatch mode torch takes another formula for these, which reads nothing but differs in
# the last bits. So a CUDA capture of the eager formula fails, and a recording would not be what
# eager computes. Found by running the gradients of torch's whole operator data base with and
# without a mode and comparing bits (torch 2.11 to 2.13).
_READING_GRADIENTS = (
    ("aten::prod", "", 0, "multiply step by step, or x.log().sum().exp()"),
    ("aten::masked_fill", "Tensor", 2, _WHERE),
    ("aten::masked_fill_", "Tensor", 2, _WHERE),
    ("aten::linalg_lstsq", "", 0, "torch.linalg.solve on the normal equations"),
    *((("aten::cumprod", "", 0, "torch 2.12 or newer"),) if CUMPROD_READS else ()),
)
_INDEX_PUT = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_JUDGED = frozenset(
    {
        *("aten::_to_copy", "aten::copy_", "aten::index", "aten::repeat_interleave"),
        *("aten::_pack_padded_sequence", *_INDEX_PUT),
        *(name for name, *_ in _READING_GRADIENTS),
    }
)
_JUDGED_TAGS = frozenset(
    {
        *(torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape),
        torch.Tag.data_dependent_output,
    }
)


def _methods(*names: str) -> Mapping[Any, str]:
    return MappingProxyType({getattr(Tensor, name): f"Tensor.{name}" for name in names})


_READERS = _methods("tolist", "numpy", "cpu", "__array__", "__repr__", "__format__", "__dlpack__")
# These run a Python function on every element, below all operators.
_WRITERS = _methods("apply_", "map_", "map2_")
# torch reads a number through these; each is an operator too, unless torch's own C++ calls it.
_NUMBERS = _methods("__float__", "__index__", "__int__", "__bool__", "__complex__", "item")
_LITERALS = MappingProxyType(
    {
        **_methods("new_tensor", "new"),
        **{getattr(torch, name): f"torch.{name}" for name in ("tensor", "as_tensor", "asarray")},
    }
)
# torch makes these up of operators whose arguments it reads from a tensor's memory.
_SPLITTING = (torch.tensor_split, Tensor.tensor_split, torch._VF._pad_packed_sequence)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)
_RECOMPUTING = frozenset({"recompute_fn", "unpack_hook", "backward"})


def refuse_op(call: OpCall, varies: Varies) -> Refusal | None:
    """Judge an operator call; None if a graph can hold it."""
    if call.op.namespace == "c10d":
        return SECRET_COLLECTIVE.of(call.op)
    if _is_plain(call.op):
        return _host_scalar(call, varies)
    found = _transfer(call) or _host_scalar(call, varies) or _reading_gradient(call)
    if found is not None:
        return found
    if _recomputes_randomly(call):
        return RANDOM_RECOMPUTE.of(call.op)
    dynamic = _has_dynamic_shape(call)
    if not dynamic and torch.Tag.data_dependent_output not in call.op.tags:
        return None
    if not any(map(varies, _deciding(call))):
        return None  # the same in every replay
    return DYNAMIC_SHAPE.of(call.op) if dynamic else HOST_READ.of(call.op)


@functools.cache  # asked for each call
def _is_plain(op: OpOverload) -> bool:
    """Tell whether no call of an operator is refused, but for a number that lies on the host."""
    return schema_of(op).name not in _JUDGED and not _JUDGED_TAGS.intersection(op.tags)


def _transfer(call: OpCall) -> Refusal | None:
    """Judge copies between host and device, which a capture permits from pinned memory only."""
    args = call.args
    if call.schema_name == "aten::_to_copy":
        source, target, on_host = args[0].device, call.kwargs.get("device"), args[:1]
    elif call.schema_name == "aten::copy_":
        source, target, on_host = args[1].device, args[0].device, args[:2]
    else:
        return None
    pinned = any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in on_host)
    if target is None or source.type == torch.device(target).type or pinned:
        return None
    if torch.device(target).type == "cpu":
        return HOST_READ.of(f"{call.op} to the host")
    return PAGEABLE_COPY.of(call.op)


def _host_scalar(call: OpCall, varies: Varies) -> Refusal | None:
    """Judge CPU scalar tensors among device tensors: their value becomes a kernel argument."""
    scalars = [each for each in call.tensors if each.dim() == 0 and each.is_cpu]
    # Outside of a capture, attention keeps seed and offset of its dropout on the host for the
    # backward pass; in a capture they lie on the device.
    if not scalars or call.schema_name.endswith("_attention_backward"):
        return None
    if not any(tensor.is_cuda for tensor in call.tensors):
        return None
    return HOST_SCALAR.of(call.op) if any(map(varies, scalars)) else None


def _reading_gradient(call: OpCall) -> Refusal | None:
    for name, overload, argument, remedy in _READING_GRADIENTS:
        if call.schema_name != name or (overload and schema_of(call.op).overload_name != overload):
            continue
        value = call.args[argument] if argument < len(call.args) else None
        reads = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        if reads:
            return dataclasses.replace(READING_GRADIENT.of(call.op), remedy=remedy)
    return None


def _recomputes_randomly(call: OpCall) -> bool:
    """Tell whether a backward pass draws numbers anew because it needs activations again."""
    if not call.is_random or not is_in_backward():
        return False  # most are none of these
    for frame in frames():
        code = frame.f_code
        if code.co_name in _RECOMPUTING and code.co_filename.endswith("torch/utils/checkpoint.py"):
            return call.draws_numbers()
    return False


def _has_dynamic_shape(call: OpCall) -> bool:
    name, args = call.schema_name, call.args
    if name == "aten::index":
        return _has_bool_mask(args[1])
    if name in _INDEX_PUT:
        # With one value to write, torch fills under the mask and needs no host read.
        return _has_bool_mask(args[1]) and args[2].numel() != 1
    if name == "aten::repeat_interleave":
        size = call.kwargs.get("output_size", args[1] if len(args) > 1 else None)
        return isinstance(args[0], Tensor) and size is None
    if name == "aten::_pack_padded_sequence":
        return True  # though torch has not tagged it
    if name == "aten::nonzero_static":
        return False
    return torch.Tag.dynamic_output_shape in call.op.tags


def _has_bool_mask(indices: object) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in flat_tensors([indices]))


def _deciding(call: OpCall) -> Sequence[Tensor]:
    """Return the tensors whose values decide a shape, or are read on the host."""
    name, args = call.schema_name, call.args
    if name in (*_INDEX_PUT, "aten::index", "aten::masked_select"):
        return flat_tensors([args[1]])  # the masks
    if name == "aten::_pack_padded_sequence":
        return [args[1]]  # the lengths
    if name == "aten::_ctc_loss" and args[0].device.type == "cpu":
        return flat_tensors(args[2:4])  # the lengths of inputs and targets, unless numbers
    return call.tensors


def refuse_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    varies: Varies,
    *,
    on_cpu: bool,
) -> Judged:
    """Judge a torch function that reaches the host without an operator, by what Python calls."""
    if function in _WRITERS:
        name = _WRITERS[function]
        return name, HOST_WRITE.of(name)
    if function in _LITERALS:
        return _judge_lists(_LITERALS[function], [*args, *kwargs.values()], varies)
    if function in _INDEXING:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return _judge_lists(f"Tensor.{function.__name__}", index, varies)
    if function is Tensor.data_ptr and on_cpu:
        name = "Tensor.data_ptr"
        return (name, RAW_ADDRESS.of(name)) if called_by_user() else None
    if function in _SPLITTING:
        name = function.__name__
        lengths = [item for item in (*args[1:], *kwargs.values()) if isinstance(item, Tensor)]
        return (name, HOST_READ.of(name)) if any(map(varies, lengths)) else None
    name = _READERS.get(function, "")
    if not name and function is Tensor.to and _goes_to_cpu(args, kwargs, on_cpu=on_cpu):
        name = "Tensor.to('cpu')"
    return _judge_read(name, args, varies)


def refuse_unseen_read(function: Callable[..., Any], args: Sequence[Any], varies: Varies) -> Judged:
    """Judge a call that no operator came of, as of the legacy constructor ``torch.Tensor``."""
    return _judge_read(_NUMBERS.get(function, ""), args, varies)


def _goes_to_cpu(args: Sequence[Any], kwargs: Mapping[str, Any], *, on_cpu: bool) -> bool:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    if isinstance(target, str):
        return torch.device(target).type == "cpu"
    # On a CPU, `x.to(y.device)` is the device-agnostic idiom and no host read on CUDA.
    return not on_cpu and isinstance(target, torch.device) and target.type == "cpu"


def _judge_read(name: str, args: Sequence[Any], varies: Varies) -> Judged:
    if not name or not isinstance(args[0], Tensor) or not varies(args[0]):
        return None
    return name, HOST_READ.of(name)


def _judge_lists(name: str, values: Sequence[Any], varies: Varies) -> Judged:
    # A list is turned into a tensor number by number; a tensor as it is makes an operator.
    lists = [value for value in values if isinstance(value, list | tuple)]
    if not any(map(varies, flat_tensors(lists))):
        return None
    return name, READ_IN_A_LIST.of(f"{name} with a tensor inside a list")


def is_fixed_result(call: OpCall, index: int, varies: Varies) -> bool:
    """Tell whether a result derives only from those inputs that are the same in every replay."""
    # The sizes of a packed sequence follow from its lengths alone.
    is_packed = call.schema_name == "aten::_pack_padded_sequence"
    return is_packed and index == 1 and not varies(call.args[1])


def for_this_place(refusal: Refusal) -> Refusal:
    """Return it with the remedy for a known place: an optimizer, or a layer that reads."""
    refusal = _for_optimizers(refusal)
    is_read = refusal.kind in (HazardKind.HOST_READ, HazardKind.DYNAMIC_SHAPE)
    return _for_layers(refusal) if is_read else refusal


def running_optimizer() -> torch.optim.Optimizer | None:
    """Return the optimizer whose step, and no backward pass in it, runs; for what runs rarely."""
    for frame in frames():
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            break
        is_step = code.co_name == "step" and code.co_argcount
        owner = frame.f_locals.get(code.co_varnames[0]) if is_step else None
        owner = getattr(owner, "steps_for", owner)  # of ours, in place of its own step
        if isinstance(owner, torch.optim.Optimizer):
            return owner
    return None


def _for_optimizers(refusal: Refusal) -> Refusal:
    optimizer = running_optimizer()
    return refusal if optimizer is None else for_step_of(optimizer, refusal)


def for_step_of(optimizer: torch.optim.Optimizer, refusal: Refusal) -> Refusal:
    """Say that it is the step of an optimizer, and what its user can do."""
    return dataclasses.replace(
        refusal,
        what=f"{type(optimizer).__name__}.step: {refusal.what}",
        remedy="an optimizer that can be captured, such as those of graphfsdp.optim; "
        "scope='forward_backward', which leaves any optimizer outside the graph; in one "
        f"of your own: {refusal.remedy}",
    )


def _for_layers(refusal: Refusal) -> Refusal:
    for frame in frames():
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(owner, _BatchNorm) and owner.momentum is None:
            name = f"{type(owner).__name__}(momentum=None)"
            return dataclasses.replace(
                refusal,
                what=f"{name} counts batches on the device and reads the count on the host, for "
                "the cumulative average of its running statistics; a replay would go on with "
                "the count of this iteration",
                remedy="a momentum, such as the default 0.1; track_running_stats=False; or eval() "
                "of this layer in training, which leaves the statistics alone",
            )
        module = f"{frame.f_globals.get('__name__')}."
        for place in _LIBRARY_MODULES:
            if module.startswith(f"{place.module}.") and refusal.kind is place.kind:
                return dataclasses.replace(refusal, what=place.what, remedy=place.remedy)
    return refusal
