"""Insides of torch under plain names: what more than one module uses, so that it breaks once.

docs/architecture.md lists them, and those that a single module uses.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._C._dynamo.guards import dict_version as dict_version
from torch._ops import OpOverload as OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.torch_version import TorchVersion
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_leaves_with_path as tree_leaves_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

if TYPE_CHECKING:  # takes a second to import
    from torch.distributed.pipelining import schedules

    PipelineSchedule = schedules._PipelineSchedule

F = TypeVar("F", bound=Callable[..., Any])


if sys.version_info[:3] == (3, 13, 0):
    # By the version of a dict guards see that a model which was put into eval() trains no more.
    raise ImportError(
        "Python 3.13.0 loses track of attributes that are written, by which graphfsdp sees that a "
        "model has changed. Remedy: another Python; 3.13.1 and newer are mended"
    )

VERSION = TorchVersion(torch.__version__)
# Whether torch leaves operators to a child of its DTensor; below 2.13 it never asks.
ASKS_SUBCLASSES = VERSION >= "2.13"
CUMPROD_READS = VERSION < "2.12"  # values on the host, in its backward pass

NO_BACKWARD = -1

# What a function mode does when it is entered and left, without five calls around it.
push_function_mode = torch._C._push_on_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack

# Where a module keeps what is called in place of its forward.
COMPILED_CALL = "_compiled_call_impl"


def caller_of_compiled_call() -> Any:
    """Return the module whose call has come to the caller, which lies there."""
    return sys._getframe(2).f_locals["self"]


def hide_compiled_calls() -> None:
    """Have ``torch.jit.script`` leave out what is called in place of a module's forward."""
    if not hasattr(nn.Module, "__jit_ignored_attributes__"):
        nn.Module.__jit_ignored_attributes__ = [COMPILED_CALL]  # type: ignore[attr-defined]


# As names of ours and not as functions: each call of one more would be on the way of each operator.
foreach_copy_ = torch._foreach_copy_
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
without_modes = _python_dispatch._disable_current_modes
dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
num_dispatch_modes = torch._C._len_torch_dispatch_stack
tracing_state = torch._C._get_tracing_state  # None where nothing is traced
num_function_modes = torch._C._len_torch_function_stack
hooks_on_saved = torch._C._autograd._top_saved_tensors_default_hooks  # None where there are none
# Whether the backward pass that is under way leaves its graph for another one.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
below_autograd = torch._C._AutoDispatchBelowAutograd
without_autocast = torch._C._DisableAutocast
backward_node = torch._C._current_autograd_node  # None outside of a backward pass
backward_id = torch._C._current_graph_task_id  # NO_BACKWARD outside
# Calls a function when the backward pass under way is over, behind those given before it.
when_backward_ends: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
functorch_level = torch._C._functorch.maybe_current_level
is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # as vmap leaves tensors
is_batched_for_engine = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched has it
num_users = torch._C._storage_Use_Count  # of the storage with such a key
key_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")  # no two that live have one
schema_of: Callable[[OpOverload], torch.FunctionSchema] = attrgetter("_schema")
binding_of: Callable[[OpOverload], Callable[..., Any]] = attrgetter("_op")  # the function in C++
# What ``named_parameters`` and its like give are copies, without what is None.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
# Of a DTensor: this rank's part, of which ``to_local`` would make a view for autograd; and mesh,
# placements and geometry, with which another one can be made.
local_tensor_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
known_spec = attrgetter("_spec")


def sequence_number(node: torch.autograd.graph.Node) -> int:
    """Return when it was made: a backward pass goes through what was made last first."""
    return node._sequence_nr()


def is_in_backward() -> bool:
    return backward_id() != NO_BACKWARD


def is_in_compiled_autograd() -> bool:
    """Tell whether torch's compiled autograd runs, where ``when_backward_ends`` calls nothing."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return getattr(module, "in_compiled_autograd_region", False)


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """Return the storage, or None if it has been freed."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return found


def spec_of(
    mesh: Any, placements: Any, shape: Any, stride: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """Return that of a tensor whose whole has such a geometry."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), stride, dtype))


def all_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def backend_of(group: dist.ProcessGroup, device: torch.device | str) -> Any:
    """RuntimeError if the group has none for such a device."""
    return group._get_backend(torch.device(device))


def part_and_offset(shape: Any, mesh: Any, placements: Any) -> tuple[Any, Any]:
    """Return shape and place of this rank's part of a DTensor, as ``torch.chunk`` cuts."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def not_compiled(function: F) -> F:
    """Let torch.compile compile neither frames of this function nor of what it calls."""
    skip = _FrameAction.SKIP
    code: CodeType = function.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(skip, skip))
    return function


def not_traced(function: F) -> F:
    """End what torch.compile traces at a call of this function, and go on behind it.

    ``torch.compiler.disable`` does so too, and imports all of torch.compile for it.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return not_compiled(function)


@contextmanager
def apart_from_checkpoints() -> Iterator[None]:
    """Hide what the body does from torch's selective checkpoints and from ``recompute``.

    The first count operators, and expect the same ones in a recomputation; the other one writes no
    tensor again that was there before, such as what a joined gather brings.
    """
    stack = dispatch_mode_stack()
    first = next((place for place, mode in enumerate(stack) if _recomputes(mode)), len(stack))
    above = [_python_dispatch._pop_mode() for _ in stack[first:]][::-1]
    others = [mode for mode in above if not _recomputes(mode)]
    for mode in others:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in others if above else ():
            _python_dispatch._pop_mode()
        for mode in above:
            _python_dispatch._push_mode(mode)


def _recomputes(mode: TorchDispatchMode) -> bool:
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    is_selective = isinstance(mode, _CachedTorchDispatchMode | _CachingTorchDispatchMode)
    return is_selective or getattr(mode, "recomputes", False)
