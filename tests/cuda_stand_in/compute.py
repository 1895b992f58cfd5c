"""What CUDA kernels would have computed, computed on the CPU on the same memory.

Each operator keeps its own CUDA code, which allocates, launches and copies as on a GPU, while its
kernels do nothing. Behind its last kernel the CPU's kernel for the same operator runs: in the
stream's turn, or, where the stream is captured, at each launch of the graph. So eager iterations
and replays have numbers, and can be compared bit for bit.
"""

import atexit
import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from cuda_stand_in import atomics, library, special
from cuda_stand_in.draws import Draws, Place

# Their sizes depend on numbers: the CPU's result is copied to the device.
_SIZES_FROM_DATA = frozenset(
    {
        *("nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal"),
        *("repeat_interleave.Tensor", "is_nonzero", "bincount"),
    }
)
# Their CUDA code does all there is to do.
_LEFT_ALONE = frozenset(
    {
        *("_local_scalar_dense", "resize_", "empty.memory_format", "empty_strided"),
        *("record_stream", "_pin_memory", "is_pinned", "_efficientzerotensor"),
        *("_sparse_coo_tensor_with_dims", "_resize_output_", "_to_copy"),
    }
)
_LEFT_ALONE_BEGINNINGS = ("set_", "cudnn", "miopen", "_cudnn", "_nested", "_sparse", "sparse")
_NUM_FORGOTTEN_AT_ONCE = 4096


class NotComputedError(RuntimeError):
    """The CPU cannot compute what an operator computes on CUDA."""


class _Op:
    """What is known about an operator before it is called."""

    def __init__(self, op: Any, own: Any, short: str) -> None:
        schema = op._schema
        self.op = op
        self.own = own
        self.short = short
        self.draws_numbers = torch.Tag.nondeterministic_seeded in op.tags
        self.tensor_positions = tuple(
            index
            for index, argument in enumerate(schema.arguments)
            if str(argument.type) in ("Tensor", "Optional[Tensor]")
        )
        self.takes_generator = any(argument.name == "generator" for argument in schema.arguments)
        self.written_positions = frozenset(
            index
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        self.names = tuple(argument.name for argument in schema.arguments)
        # Results that are new; others are arguments, which it writes by itself.
        self.makes = tuple(value.alias_info is None for value in schema.returns)
        self.sizes_from_data = short in _SIZES_FROM_DATA
        self.is_fill = short == "fill_.Scalar"
        self.compute: Callable[..., Any] = special.COMPUTE.get(schema.name, op)

    def is_tensor_code(self, args: Any) -> bool:
        """Tell whether FusedAdam's operator calls others in place of its kernel.

        Some of those are copies by the driver, which move what nobody has computed within it.
        """
        return self.short == "fused_adam_" and not args[self.names.index("tables")]

    def with_tensors(self, args: Any) -> Any:
        """Make tensors of numbers again, which torch has unwrapped for Python."""
        numbers = [
            index
            for index in self.tensor_positions
            if index < len(args) and isinstance(args[index], int | float | complex)
        ]
        if not numbers:
            return args
        like = next((value for value in args if isinstance(value, Tensor)), None)
        changed = list(args)
        with _below_torch():
            for index in numbers:
                dtype = None if like is None else torch.result_type(like, args[index])
                changed[index] = torch.tensor(args[index], dtype=dtype)
        return tuple(changed)

    def touched(self, args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Tensor, bool]]:
        """Yield the tensors of a call, and whether each is written."""
        named = (*zip(self.names, args, strict=False), *kwargs.items())
        written = {self.names[index] for index in self.written_positions}
        for name, value in named:
            yield from ((tensor, name in written) for tensor in _tensors(value))
        yield from ((tensor, True) for tensor in self.new_tensors(result))

    def new_tensors(self, result: Any) -> list[Tensor]:
        """Return those of its results that are no arguments."""
        if all(self.makes):
            return _tensors(result)
        results = result if isinstance(result, tuple) else (result,)
        new = (item for item, makes in zip(results, self.makes, strict=False) if makes)
        return [tensor for item in new for tensor in _tensors(item)]

    def computation(
        self, args: Any, kwargs: Any, result: Any, place: Place | None
    ) -> Callable[[], None]:
        """Return what computes it on the memory that it has now."""
        op, compute = self.op, self.compute
        reorders = atomics.order_of(op._schema.name)  # now, as the kernel is chosen
        is_nudged = atomics.is_nudged(op._schema.name)
        with _below_torch():
            cpu_args, cpu_kwargs = _on_cpu(args), _on_cpu(kwargs)
            # What torch keeps on the host has its numbers already.
            new = self.new_tensors(result)
            targets = [_on_cpu(tensor) if tensor.is_cuda else None for tensor in new]

        def run() -> None:
            with _below_torch():
                given = cpu_kwargs
                if place is not None and compute is not op:
                    given = {**given, "draw": place()}
                elif place is not None and self.takes_generator:
                    given = {**given, "generator": place().generator()}
                ordered = cpu_args if reorders is None else reorders(*cpu_args)
                results = compute(*ordered, **given)
                found = self.new_tensors(results) if compute is op else results
                for target, exact in zip(targets, found, strict=True):
                    computed = atomics.nudge(exact) if is_nudged else exact
                    # The CPU leaves some out, which nobody will read.
                    if target is not None and target.numel() and computed.numel():
                        target.copy_(computed)

        return run


class _Kernels:
    """All that is kept for numbers: what waits in queues and graphs, and the registrations."""

    def __init__(self) -> None:
        self.draws = Draws()
        self._library = library.functions()
        self._runs: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._registrations: list[torch.library.Library] = []
        self._within = threading.local()  # an operator: its inner operators compute nothing
        self._error: BaseException | None = None  # of what was computed last
        _hide_from_dynamo(_Kernels._run)
        _hide_from_dynamo(_Kernels._kernel)
        self._callback = library.COMPUTE(self._run)
        self._library.stand_in_set_compute(self._callback)
        # What is destroyed behind Python must not call it.
        atexit.register(self._library.stand_in_set_compute, library.COMPUTE())

    def override(self, op: Any, namespace: str, short: str) -> None:
        """Put the CPU's kernel of an operator behind its CUDA code."""
        known = _Op(op, torch.library.get_kernel(op, "CUDA"), short)
        registration = torch.library.Library(namespace, "IMPL")
        self._registrations.append(registration)
        # No closure: what this holds plays C++, and is none of what the product looks through.
        kernel = functools.partial(self._kernel, known)
        registration.impl(short, kernel, "CUDA", with_keyset=True, allow_override=True)

    def _kernel(self, known: _Op, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        with _unseen():
            return self._call(known, keyset, args, kwargs)

    def _call(self, known: _Op, keyset: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator's CUDA code, and have what its kernels would do computed behind it."""
        args = known.with_tensors(args)
        if known.is_tensor_code(args):
            return known.own.call_boxed(keyset, *args, **kwargs)
        is_within = getattr(self._within, "is_in", False)
        is_real = known.short == "copy_" and not _all_cuda(args)  # between host and device
        if is_real or (is_within and not known.sizes_from_data):
            return known.own.call_boxed(keyset, *args, **kwargs)
        device = _device_of(args, kwargs)
        stream = self._library.stand_in_stream(torch._C._cuda_getCurrentRawStream(device), device)
        if known.sizes_from_data and not self._library.stand_in_capture_id(stream):
            return _computed_first(known.op, device, args, kwargs)
        if is_within:
            return known.own.call_boxed(keyset, *args, **kwargs)
        place: Place | None = None
        done: Callable[[], None] | None = None
        if known.draws_numbers:
            place, done = self._place(known.short, device, stream, args, kwargs)
        elif known.is_fill and args[0].dtype == torch.int64 and args[0].numel() == 1:
            self.draws.note_fill(args[0], int(args[1]))
        self._within.is_in = True
        num_nodes = self._library.stand_in_begin_operator(stream)
        try:
            result = known.own.call_boxed(keyset, *args, **kwargs)
        finally:
            self._within.is_in = False
            self._library.stand_in_end_operator()
        if done is not None:
            done()
        self._attach(known, stream, num_nodes, args, kwargs, result, place)
        return result

    def _place(
        self, short: str, device: int, stream: int, args: Any, kwargs: Any
    ) -> tuple[Place, Callable[[], None]]:
        given = [*_leaves(args), *_leaves(kwargs)]
        generators = (leaf for leaf in given if isinstance(leaf, torch.Generator))
        generator = next(generators, torch.cuda.default_generators[device])
        sizes = [leaf.numel() if isinstance(leaf, Tensor) else leaf for leaf in given]
        call = (short, *(size for size in sizes if isinstance(size, int | float)))
        return self.draws.begin(generator, self._library.stand_in_capture_id(stream), call)

    def _attach(
        self,
        known: _Op,
        stream: int,
        num_nodes: int,
        args: Any,
        kwargs: Any,
        result: Any,
        place: Place | None,
    ) -> None:
        """Have it computed in the stream's turn."""
        number = next(self._numbers)
        if not number % _NUM_FORGOTTEN_AT_ONCE:
            self._forget()
        self._runs[number] = known.computation(args, kwargs, result, place)
        answer = self._library.stand_in_attach(stream, number, num_nodes)
        if answer == library.CAPTURED:
            self._touch(known, stream, args, kwargs, result)
        if answer in (library.DONE, library.FAILED, library.INVALID, library.NO_NODE):
            self._runs.pop(number, None)
        if answer == library.FAILED:
            error, self._error = self._error, None
            if isinstance(error, Exception):
                raise NotComputedError(f"the stand-in cannot compute {known.op}") from error
            assert error is not None
            raise error  # of a test's time limit, say
        if answer == library.NO_NODE and _has_changed(known.short, args, result):
            raise NotComputedError(f"{known.op} has launched nothing in a capture")

    def _touch(self, known: _Op, stream: int, args: Any, kwargs: Any, result: Any) -> None:
        """Say what an operator reads and writes, so that missing dependencies are found."""
        name = str(known.op).encode()
        for tensor, is_written in known.touched(args, kwargs, result):
            if tensor.is_cuda and tensor.numel():
                begin, num_bytes = tensor.data_ptr(), _extent_bytes(tensor)
                self._library.stand_in_touch(stream, name, begin, num_bytes, is_written)

    def _forget(self) -> None:
        """Drop what no graph and no queue can run any more."""
        tokens = (ctypes.c_uint64 * _NUM_FORGOTTEN_AT_ONCE)()
        count = _NUM_FORGOTTEN_AT_ONCE
        while count == _NUM_FORGOTTEN_AT_ONCE:
            count = self._library.stand_in_take_forgotten(tokens, _NUM_FORGOTTEN_AT_ONCE)
            for token in tokens[:count]:
                self._runs.pop(token, None)

    def _run(self, number: int) -> int:
        """Answer the library: compute what was attached under that number."""
        try:
            with _unseen():
                self._runs[number]()
        except BaseException as error:
            if isinstance(error, Exception):
                traceback.print_exc()
            self._error = error
            return 1
        return 0


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Let the product's own profile hook see no Python that plays C++."""
    hook: Any = sys.getprofile()
    if not callable(hook):
        yield
        return
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(hook)


def _hide_from_dynamo(function: Callable[..., Any]) -> None:
    """Let torch.compile trace neither a function that plays C++ nor what it calls."""
    skip = _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))


@contextlib.contextmanager
def _below_torch() -> Iterator[None]:
    """Run operators as a kernel does: nobody records, differentiates or watches them."""
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
    ):
        yield


def _computed_first(op: Any, device: int, args: Any, kwargs: Any) -> Any:
    """Compute an operator whose result's size depends on numbers."""
    if not _all_cuda(args):
        raise RuntimeError(f"Expected all tensors to be on the same device: {op}")
    # As on a GPU the host waits, and is seen to wait.
    torch.ops.aten._local_scalar_dense(torch.empty(1, device=torch.device("cuda", device)))
    with _below_torch():
        computed = op(*_on_cpu(args), **_on_cpu(kwargs))
    if isinstance(computed, tuple):
        return tuple(tensor.cuda(device) for tensor in computed)
    return computed.cuda(device) if isinstance(computed, Tensor) else computed


def _on_cpu(value: Any) -> Any:
    """Return arguments with CPU tensors on the memory of CUDA tensors."""
    if isinstance(value, Tensor):
        return _tensor_on_cpu(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    if isinstance(value, dict):
        return {name: _on_cpu(item) for name, item in value.items()}
    if isinstance(value, torch.Generator):
        return None  # the one of the draw takes its place
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _tensor_on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        # A number on the host is read when the kernel is launched, and may change then.
        return tensor.detach().clone() if tensor.device.type == "cpu" else tensor
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), num_bytes
    )
    view = torch.empty(0, dtype=tensor.dtype).set_(
        memory, tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if tensor.is_conj():
        view = view.conj()
    return view._neg_view() if tensor.is_neg() else view


def _extent_bytes(tensor: Tensor) -> int:
    """From its first element to behind its last one, gaps included."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.element_size()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def _has_changed(short: str, args: Any, result: Any) -> bool:
    """Tell whether an operator should have launched something."""
    if short == "copy_" and args[0].data_ptr() == args[1].data_ptr():
        return False
    return any(tensor.numel() for tensor in _tensors(result))


def _all_cuda(args: Any) -> bool:
    return all(leaf.is_cuda for leaf in args if isinstance(leaf, Tensor))


def _device_of(args: Any, kwargs: Any) -> int:
    for value in (args, kwargs):
        for leaf in _leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                return leaf.get_device()
    device = kwargs.get("device")
    index = device.index if isinstance(device, torch.device) else None
    return torch.cuda.current_device() if index is None else index


@functools.cache
def _kernels() -> _Kernels:
    return _Kernels()


def _override(op: Any, namespace: str, short: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there was a kernel before
        _kernels().override(op, namespace, short)


def install_op(name: str) -> None:
    """Compute one operator, given as ``namespace::name`` or with its overload behind a dot."""
    namespace, _, short = name.partition("::")
    base, _, overload = short.partition(".")
    op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    _override(op, namespace, short)


def install() -> None:
    """Compute all of torch's own operators that have a CUDA kernel."""
    torch.backends.cudnn.enabled = False  # it is not played
    torch.backends.cuda.enable_cudnn_sdp(False)
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in sorted({*names, "aten::copy_"}):
        namespace, _, short = name.partition("::")
        if namespace != "aten" or short in _LEFT_ALONE:
            continue
        if short.startswith(_LEFT_ALONE_BEGINNINGS):
            continue
        base, _, overload = short.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and not _returns_view(op):
            _override(op, namespace, short)


def _returns_view(op: Any) -> bool:
    return any(
        value.alias_info is not None and not value.alias_info.is_write
        for value in op._schema.returns
    )
