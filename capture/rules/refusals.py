"""What a capture may not do, in one place for both backends.

Each rule answers with a reason and a remedy, or None. The CUDA column of DESIGN's contract is
enforced by the driver too (errors 900 to 908); these rules speak first, and in names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp._capture.rules.backward import host_reading_gradient
from graphfsdp.base.hazards import HazardKind

Varies = Callable[[Tensor], bool]

_HOST_READ_REMEDY = (
    "keep the value on the device (torch.where instead of `if`, a 0-D tensor instead of a "
    "number), or move the read outside the captured iteration"
)
_SHAPE_REMEDY = (
    "use a fixed-shape form: multiply by the mask or torch.where instead of boolean indexing, "
    "torch.topk or a padded capacity instead of nonzero, output_size= for repeat_interleave"
)
_INDEX_PUT = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_GENERATOR_REMEDY = (
    "set the state before the loop; in place of torch.utils.checkpoint call graphfsdp.recompute, "
    "or pass it preserve_rng_state=False and context_fn=graphfsdp.recompute_contexts"
)


# Numbers of the CUDA errors that a capture would end in (cuda_errors.py has their meaning).
UNSUPPORTED = 900
UNJOINED = 904
ISOLATION = 905
CAPTURED_EVENT = 907


@dataclass(frozen=True)
class Refusal:
    """Why a graph cannot hold an operation, and what to do.

    Attributes:
        what: What the operation does, and why a graph cannot hold it.
        remedy: What to do.
        kind: What sort of thing it is.
        cuda_error: Number of the CUDA error that it causes, None if it causes none.
    """

    what: str
    remedy: str
    kind: HazardKind
    cuda_error: int | None = None

    @property
    def message(self) -> str:
        """Both as one sentence each."""
        return f"{self.what}. Remedy: {self.remedy}"


def host_read(how: str) -> Refusal:
    """Return the refusal of a read of an iteration's value on the host."""
    return Refusal(
        f"{how} reads a value of the iteration on the host; a replay runs recorded kernels and "
        "no Python, so every later iteration would go on with the value of this one",
        _HOST_READ_REMEDY,
        HazardKind.HOST_READ,
        UNSUPPORTED,
    )


def host_wait(how: str) -> Refusal:
    """Return the refusal of a wait of the host for the device."""
    return Refusal(
        f"{how} makes the host ask or wait for the device inside the iteration; CUDA does not "
        "permit that during a capture, and a replay runs no Python",
        "order streams among themselves (wait_stream, wait_event), and time or wait outside "
        "the iteration",
        HazardKind.SYNCHRONIZE,
        UNSUPPORTED,
    )


def no_storage(layout: object) -> Refusal:
    """Return the refusal of a tensor that does not lie in one piece of memory."""
    return Refusal(
        f"a tensor of layout {layout} has no storage that a graph could hold at a fixed address",
        "use strided (dense) tensors inside the iteration",
        HazardKind.MEMORY,
    )


def generator_state(how: str) -> Refusal:
    """Return the refusal of reading or setting the state of a random generator."""
    return Refusal(
        f"{how} reads or sets the state of a random generator inside the iteration; a replay "
        "advances the generator by itself and never runs this Python",
        _GENERATOR_REMEDY,
        HazardKind.GENERATOR,
    )


def new_generator(how: str) -> Refusal:
    """Return the refusal of a generator that nothing was drawn from before."""
    return Refusal(
        f"{how} draws from a random generator that is as new; if the iteration makes it, eager "
        "would start it anew each time, and a replay goes on drawing from one",
        "make the generator before the loop, and seed it",
        HazardKind.GENERATOR,
    )


def compiled_region(name: str) -> Refusal:
    """Return the refusal of a region made by torch.compile, which a CPU recording cannot see."""
    return Refusal(
        f"{name} is compiled by torch.compile; its kernels are invisible to a recording on a CPU "
        "and would be missing from every replay",
        "capture the uncompiled module on a CPU (on CUDA compiled kernels are recorded)",
        HazardKind.COMPILED,
    )


def higher_order(name: str) -> Refusal:
    """Return the refusal of an operator that takes functions (torch.cond and its like)."""
    return Refusal(
        f"{name} is a higher-order operator; which of its functions runs is decided in Python",
        "write it with tensor operations, such as torch.where on both results",
        HazardKind.CONTROL_FLOW,
        UNSUPPORTED,
    )


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _transfer(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Refusal | None:
    """Judge copies between host and device, which a capture permits from pinned memory only."""
    if op._schema.name == "aten::_to_copy":
        source, target = args[0].device, kwargs.get("device")
        host_pinned = args[0].device.type == "cpu" and args[0].is_pinned()
    elif op._schema.name == "aten::copy_":
        source, target = args[1].device, args[0].device
        host_pinned = any(t.device.type == "cpu" and t.is_pinned() for t in args[:2])
    else:
        return None
    if target is None or source.type == torch.device(target).type or host_pinned:
        return None
    if torch.device(target).type == "cpu":
        return host_read(f"{op} to the host")
    return Refusal(
        f"{op} copies a tensor from pageable host memory to the device inside the iteration; "
        "CUDA does not permit that during a capture (error 900), and a replay would repeat the "
        "old contents",
        "make the tensor on the device (device=x.device), or before the iteration",
        HazardKind.HOST_TENSOR,
        UNSUPPORTED,
    )


def _host_scalar(
    op: torch._ops.OpOverload, inputs: Sequence[Tensor], varies: Varies
) -> Refusal | None:
    """Judge CPU scalar tensors among device tensors: their value becomes a kernel argument."""
    if not any(tensor.device.type == "cuda" for tensor in inputs):
        return None
    for tensor in inputs:
        if tensor.device.type == "cpu" and tensor.dim() == 0 and varies(tensor):
            return Refusal(
                f"{op} reads a 0-D CPU tensor beside CUDA tensors; its value is baked into the "
                "kernel's arguments and later changes never reach a replay",
                "keep the scalar on the device (tensor.to(device) before the loop)",
                HazardKind.BAKED_NUMBER,
            )
    return None


def _has_bool_mask(indices: object) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(indices))


def _has_dynamic_shape(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    name = op._schema.name
    if name == "aten::index":
        return _has_bool_mask(args[1])
    if name in _INDEX_PUT:
        # With one value to write, torch fills under the mask and needs no host read.
        return _has_bool_mask(args[1]) and args[2].numel() != 1
    if name == "aten::repeat_interleave":
        size = kwargs.get("output_size", args[1] if len(args) > 1 else None)
        return isinstance(args[0], Tensor) and size is None
    if name == "aten::_pack_padded_sequence":
        return True  # though torch has not tagged it
    if name == "aten::nonzero_static":
        return False
    return torch.Tag.dynamic_output_shape in op.tags


def _deciding(
    op: torch._ops.OpOverload, args: Sequence[Any], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the tensors whose values decide a shape, or are read on the host."""
    if op._schema.name in (*_INDEX_PUT, "aten::index", "aten::masked_select"):
        return _tensors([args[1]])  # the masks
    if op._schema.name == "aten::_pack_padded_sequence":
        return [args[1]]  # the lengths
    if op._schema.name == "aten::_ctc_loss" and args[0].device.type == "cpu":
        return _tensors(args[2:4])  # the lengths of inputs and targets, unless they are numbers
    return inputs


def refuse_op(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], varies: Varies
) -> Refusal | None:
    """Judge an operator call.

    Args:
        op: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        varies: Tells whether a tensor's contents differ from replay to replay.

    Returns:
        The refusal, or None if a graph can hold the call.
    """
    namespace = op.namespace
    if namespace == "c10d":
        return Refusal(
            f"{op} is a collective that writes tensors without saying so in its schema",
            "use functional collectives (torch.distributed._functional_collectives) or run the "
            "collective outside the captured iteration",
            HazardKind.COLLECTIVE,
        )
    inputs = _tensors(list(args)) + _tensors(list(kwargs.values()))
    crossing = _transfer(op, args, kwargs) or _host_scalar(op, inputs, varies)
    if crossing is not None:
        return crossing
    gradient = host_reading_gradient(op, args)
    if gradient is not None:
        return Refusal(
            f"the gradient of {op} is computed by reading values on the host, which a graph "
            "cannot hold (under a recording torch takes another formula, with other last bits)",
            gradient.remedy,
            HazardKind.GRADIENT,
            UNSUPPORTED,
        )
    dynamic = _has_dynamic_shape(op, args, kwargs)
    if not dynamic and torch.Tag.data_dependent_output not in op.tags:
        return None
    if not any(varies(tensor) for tensor in _deciding(op, args, inputs)):
        return None  # the same in every replay
    if dynamic:
        return Refusal(
            f"{op} returns a tensor whose shape depends on values; a graph's shapes are fixed",
            _SHAPE_REMEDY,
            HazardKind.DYNAMIC_SHAPE,
            UNSUPPORTED,
        )
    return host_read(str(op))


def is_fixed_result(
    op: torch._ops.OpOverload, args: Sequence[Any], index: int, varies: Varies
) -> bool:
    """Tell whether a result derives only from those inputs that are the same in every replay."""
    # The sizes of a packed sequence follow from its lengths alone.
    return op._schema.name == "aten::_pack_padded_sequence" and index == 1 and not varies(args[1])
