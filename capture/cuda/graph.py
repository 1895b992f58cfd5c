"""The CUDA backend: the iteration as one torch.cuda.CUDAGraph."""

import gc
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphfsdp._capture.cuda.errors import explain
from graphfsdp._capture.cuda.host_copies import HostCopies, PinnedMemory
from graphfsdp._capture.cuda.recorder import CudaRecorder, UnwatchedRecorder, find_driver
from graphfsdp._capture.ranks.group_ends import (
    backends_of,
    close_before_groups_end,
    issued_collectives,
)
from graphfsdp._capture.rules.constants import COMPILES_IN_CAPTURE
from graphfsdp._capture.rules.watcher import Watcher
from graphfsdp._capture.trace.backend import Check, Effect, Graph, GraphFacts, Iterate
from graphfsdp._capture.trace.source import has_compiled_regions, module_of, user_line_of
from graphfsdp._capture.trace.values import refuse_dropped_tensors
from graphfsdp._capture.undo.host_state import generators_of
from graphfsdp.base.dtensors import local_part
from graphfsdp.base.streams import (
    collecting_kept,
    forked,
    in_turn,
    keep_for_current,
    without_collector,
)
from graphfsdp.base.torch_internals import all_groups
from graphfsdp.errors import CaptureError, ConfigError, HazardKind

# Torch 2.14 and newer: a graph registers generators at their first draw, reset() brings allocator
# and generators out of a capture that could not be ended, and names that a model gives to its
# kernels (torch.cuda.graph_annotations) reach profilers.
_TORCH_ENDS_BROKEN_CAPTURES = hasattr(torch.cuda.CUDAGraph, "pools")
_OPTIONS: dict[str, Any] = {"enable_annotations": True} if _TORCH_ENDS_BROKEN_CAPTURES else {}
_LOG = logging.getLogger("graphfsdp")
# Settings of NCCL and torch, by their variables.
_REGISTER = "NCCL_GRAPH_REGISTER"
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OFF = ("", "0", "n", "no", "f", "false")
_REGISTERS_SEGMENTS = (10, 0)  # compute capability from which on expandable segments are safe


class CudaGraph:
    """A captured iteration and the fixed tensors in which it leaves its results."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: list[Tensor],
        external: list[object],
        facts: GraphFacts,
        device: torch.device,
        groups: frozenset[str],
    ) -> None:
        """``groups`` are those in which it has captured collectives."""
        self.groups = groups
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._in_use = threading.Lock()  # by a launch
        self._device = device
        self._outputs = outputs
        # CUDA rule: a graph knows addresses, not tensors. Whoever lets go of a tensor that the
        # iteration uses must not give its memory to somebody else while the graph lives.
        self._external = external
        self.facts = facts
        self.effect = Effect.NONE

    def replay(self) -> list[Tensor]:
        """Launch the graph on the current stream; return copies of its results."""
        if self._graph is None:
            raise CaptureError(
                "the graph was closed, since a process group in which it has collectives was ended "
                f"or aborted: one of {', '.join(sorted(self.groups))}. Remedy: capture anew"
            )
        self.effect = Effect.NONE
        # The next replay overwrites the graph's own results. Allocated first: what may run out of
        # memory does so before anything is written.
        copies = [torch.empty_like(output) for output in self._outputs]
        self.effect = Effect.PART
        with self._in_use:
            self._graph.replay()
        self.effect = Effect.ALL
        if copies:  # an iteration of the user's own may return nothing
            torch._foreach_copy_(copies, self._outputs)
        return copies

    @property
    def is_open(self) -> bool:
        """Whether it can be replayed and holds its pool."""
        return self._graph is not None

    def compile(self) -> None:
        """Do nothing: what compiled regions have made is in the graph."""

    def close(self) -> None:
        """Give the graph back, and then the pool that its tensors lie in."""
        if self._graph is not None:
            # CUDA rule: memory of a graph may be reused only when no launch is in flight. To wait
            # for that breaks any capture that is under way.
            with in_turn(), self._in_use:
                with suppress(RuntimeError):  # of a kernel: whoever closes because of it knows it
                    torch.cuda.synchronize(self._device)
                self._graph.reset()
            self._graph = None
        self._outputs = []
        self._external = []

    def abandon(self) -> None:
        """Give the graph back, but neither wait nor let go of the tensors that it uses.

        What is in flight may wait for a rank that never comes, or be on its way out of that.
        CUDA rule: a graph that was destroyed is freed when its launches have ended.
        """
        if self._graph is None or not self._in_use.acquire(blocking=False):
            return
        try:
            with suppress(RuntimeError):  # of a kernel: whoever abandons it knows it
                self._graph.reset()
            self._graph = None
        finally:
            self._in_use.release()


class CudaGraphBackend:
    """Captures on another stream than the caller's, on which the warm-up runs too."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        _prepare_nccl(self.device)
        # CUDA rule: a capture cannot run on the default stream, and autograd nodes remember the
        # stream that they were made on; so warm-up and capture share this one.
        self._stream = _capture_stream(index)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()  # those that share the pool
        self._broken: list[torch.cuda.CUDAGraph] = []  # see Note [Broken captures]
        self._host_memory = PinnedMemory()

    def on_capture_stream(self) -> AbstractContextManager[list[Tensor]]:
        """Fork to the capture stream and join back."""
        return _on_stream(self._stream)

    def give_back_memory(self, *, workspaces: bool = True) -> None:
        if not torch.cuda.is_current_stream_capturing():
            if workspaces:
                _drop_workspaces()
            torch.cuda.empty_cache()

    def begin_undo(self, state: Iterable[Tensor], scratch: Iterable[Tensor] = ()) -> HostCopies:
        return HostCopies(state, self._host_memory)

    def record(
        self,
        iterate: Iterate,
        model: nn.Module,
        check: Check,
        *,
        collective: bool,
        scratch: Sequence[Tensor],
    ) -> tuple[Graph, list[Tensor]]:
        """Capture one iteration, then launch it once; see GraphBackend.record."""
        if not has_compiled_regions(model):
            try:
                return self._record(iterate, model, check, CudaRecorder)
            except CaptureError as error:
                if error.kind is not HazardKind.COMPILED:
                    raise
            except RuntimeError as error:
                if COMPILES_IN_CAPTURE not in str(error):
                    raise
        # See Note [Compiled regions]. Of the first attempt nothing has run but Python.
        return self._record(iterate, model, check, UnwatchedRecorder)

    def _record(
        self, iterate: Iterate, model: nn.Module, check: Check, recorder: type[CudaRecorder]
    ) -> tuple[Graph, list[Tensor]]:
        driver = find_driver()
        watcher = recorder(model, self.device, driver)
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # so that its nodes can be counted
        # A graph has the default generator by itself; older torch must be told of others, or their
        # state would be baked in.
        others = [] if _TORCH_ENDS_BROKEN_CAPTURES else generators_of(model, self.device)[2:]
        generators = [each for each in others if each.device.type == "cuda"]
        for generator in generators:
            graph.register_generator_state(generator)
        if not any(other.is_open for other in self._graphs):
            # The allocator forbids to use the number of a pool again that all graphs have left.
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        # torch.cuda.graph does so as well: what it gives back is not the pool's.
        self.give_back_memory()
        before = torch.cuda.memory_reserved(self.device)
        issued = issued_collectives()
        try:
            with (
                without_collector(),
                _streams_unremarked(),
                watcher.watching(),
                collecting_kept() as external,
            ):
                outputs = self._capture(graph, iterate, watcher)
            gc.collect()
            refuse_dropped_tensors(watcher.storages)
            handle = graph.raw_cuda_graph()
            num_nodes = None if driver is None else driver.count(handle)
            program = watcher.describe(outputs, handle)
            if num_nodes is not None:  # else the first replay does it
                graph.instantiate()
            check(watcher.has_touched)
        except BaseException as error:
            if _TORCH_ENDS_BROKEN_CAPTURES or _has_ended(graph):
                with suppress(RuntimeError):  # the error of the iteration is the one to tell
                    graph.reset()
            else:
                self._broken.append(graph)
                if not _end_broken_capture(graph, self.device, self._pool, generators):
                    self._pool = torch.cuda.graph_pool_handle()
            self._translate(error, watcher, model)
            raise
        pool_bytes = max(torch.cuda.memory_reserved(self.device) - before, 0)
        facts = GraphFacts(
            num_nodes=num_nodes,
            num_ops=watcher.num_ops,
            op_counts=program.op_counts(),
            pool_bytes=pool_bytes,
            describe=lambda: program,
            written=[info.get() for info in watcher.storages if info.external and info.is_written],
        )
        external += [info.get() for info in watcher.storages if info.external]
        external += [local_part(tensor).untyped_storage() for tensor in _tensors_of(model)]
        now = issued_collectives()
        groups = frozenset(name for name in now if now[name] != issued.get(name, 0))
        captured = CudaGraph(graph, outputs, external, facts, self.device, groups)
        self._graphs.add(captured)
        if groups:
            close_before_groups_end(captured)
        self._host_memory.end()  # with this attempt
        self._host_memory = PinnedMemory()  # for another shape, or a verification
        # A capture runs nothing: this launch is the iteration that was recorded.
        return captured, captured.replay()

    def _capture(
        self, graph: torch.cuda.CUDAGraph, iterate: Iterate, watcher: Watcher
    ) -> list[Tensor]:
        stream, index = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        # thread_local: an illegal call on another thread (a loader that pins memory) is no
        # business of this capture.
        capture = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
            **_OPTIONS,
        )
        try:
            capture.__enter__()
            try:
                watcher.follow_streams()
                outputs = iterate()
                watcher.refuse_loose_streams()
            except BaseException:
                # The first error is the one to tell: a stream that it has left unjoined makes the
                # end of the capture fail as well.
                with suppress(RuntimeError):
                    _end(capture)
                raise
            _end(capture)
            # Just before a capture torch writes seed and offset on the capturing stream, and before
            # each replay on the current one: nothing else puts the two in order.
            stream.wait_stream(self._stream)
            return outputs
        finally:
            _drop_workspaces()
            # torch.cuda.graph leaves its stream current when ending a broken capture raises, and
            # with a stream goes its device.
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(index)

    def _translate(self, error: BaseException, watcher: Watcher, model: nn.Module) -> None:
        if watcher.failure is not None and error is not watcher.failure:
            raise watcher.failure from error
        meaning = explain(error)
        if meaning is not None and not isinstance(error, CaptureError):
            # The driver speaks when an operator fails. Line and module are in the exception, but in
            # a backward pass: there the module is that of the last operator that was started.
            sites = watcher.sites.sites()
            site = sites[watcher.site] if sites else None
            module = module_of(error, model)
            if module is None and site is not None:
                module = site.module
            raise CaptureError(
                str(meaning),
                op=watcher.last_op,
                module_path=module,
                source=user_line_of(error) or (None if site is None else site.source),
                kind=meaning.kind,
                cuda_error=meaning.code,
            ) from error


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the one of a device: what the allocator has given to a stream is of no use to others.

    So what one step has left behind serves the next one. torch hands its 32 streams out again and
    again, so that one of those may be somebody else's as well, whose work on another thread would
    land in the graph.
    """
    driver = find_driver()
    with torch.cuda.device(device):  # and so its context
        handle = None if driver is None else driver.new_stream()
    if handle is None:
        return torch.cuda.Stream(device)
    return torch.cuda.ExternalStream(handle, device)


def _end(capture: torch.cuda.graph) -> None:
    with warnings.catch_warnings():
        # An iteration that launches nothing is captured all the same, and so is one that was
        # refused before its first kernel; that is told by its own error.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        capture.__exit__(None, None, None)


def _drop_workspaces() -> None:
    """Have cuBLAS begin with new workspaces on all streams.

    Note [Workspaces]: torch keeps one for each stream, of 32 MiB on Hopper, for as long as nobody
    drops them all, as captures of torch.compile do. One that the warm-up has left would be in the
    graph, but not in its pool: when it is dropped, replays write into memory of others. One that
    the capture has made lies in the pool, and no eager product may go on with it. As a consequence
    no step leaves one behind on its stream.
    """
    torch._C._cuda_clearCublasWorkspaces()


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Tell whether a capture came to its proper end, be it before an exception or because of it."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


def _end_broken_capture(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    pool: tuple[int, int],
    generators: Sequence[torch.Generator],
) -> bool:
    """Bring torch's allocator and generators out of a capture that could not be ended.

    Note [Broken captures]: what a capture must not do (a host read, a stream that was not joined)
    makes the driver throw the capture away, and then torch before 2.14 leaves out the rest of what
    ends one: the allocator goes on believing that a capture is under way, so that the next
    ``torch.cuda.empty_cache``, and with it the next capture, fails an assertion; and before torch
    2.13 generators refuse every draw outside a capture. The allocator is told that the capture is
    over, and the generators take part in another, tiny one. The graph itself has to be kept: the
    allocator of pinned memory goes on asking it. Not run on a GPU yet.

    Returns:
        Whether the pool can be used by another capture.
    """
    with suppress(RuntimeError):  # nothing was instantiated
        graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    except RuntimeError:  # it never began
        return False
    try:
        torch._C._cuda_releasePool(device.index, pool)
        _end_generators(device, generators)
    except RuntimeError:  # the error of the capture is the one to tell
        return False
    return True


def _end_generators(device: torch.device, generators: Sequence[torch.Generator]) -> None:
    number = torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    stream = torch.cuda.Stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        number.zero_()
    graph.reset()


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[list[Tensor]]:
    results: list[Tensor] = []
    with in_turn():
        with _streams_unremarked(), forked(stream):
            yield results
        # Another step, called on another stream, is the next to be given their memory.
        keep_for_current((result for result in results if result.is_cuda), stream)


@contextmanager
def _streams_unremarked() -> Iterator[None]:
    """Let torch say nothing of gradients that are accumulated on another stream than usual.

    Where an old loss is still held, that is so by design: iterations have a stream of their own,
    and are ordered after and before what the caller's stream does.
    """
    core: Any = torch._C
    if not core._warn_on_accumulate_grad_stream_mismatch():
        yield
        return
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def _prepare_nccl(device: torch.device) -> None:
    """Choose what nobody has chosen; ConfigError for what captured collectives cannot have.

    Note [Registered buffers]: in captures alone NCCL registers the buffers of collectives
    (NCCL_GRAPH_REGISTER is 1 by default). That is where captured collectives hang and eager ones do
    not: with expandable segments below compute capability 10 (pytorch/pytorch#158029,
    pytorch/torchtitan#3306), over a network where a small collective comes before a large one on
    the same connection (NVIDIA/nccl#2389), and on machines with an NVSwitch in the registration
    itself, which waits on the host for all local ranks without a look at the abort flag. What it
    brings is a copy less where NCCL could read and write the buffers directly. So it is turned off
    where nobody has chosen. NCCL reads the variable when the first collective of the process is
    captured.
    """
    if not (dist.is_available() and dist.is_initialized() and _has_nccl_ranks()):
        return
    blocking = next((name for name in _BLOCKING if _is_on(name)), None)
    if blocking is not None:
        raise ConfigError(
            f"{blocking}={os.environ[blocking]}: every collective would ask on the host whether it "
            "has run, which is an error 907 in a capture. Remedy: unset it; a rank that is lost is "
            "found without it, by torch's watchdog and in replays by graphfsdp's"
        )
    chosen = os.environ.get(_REGISTER)
    if chosen is None:
        os.environ[_REGISTER] = "0"
        _LOG.info(
            "%s=0 is set: registered buffers are where captured collectives of NCCL hang; set it "
            "yourself to choose (docs/scale.md)",
            _REGISTER,
        )
    elif chosen != "0" and _has_expandable_segments() and _capability(device) < _REGISTERS_SEGMENTS:
        raise ConfigError(
            f"{_REGISTER}={chosen} with expandable_segments:True on compute capability "
            f"{'.'.join(map(str, _capability(device)))}: NCCL would register memory that cannot be "
            "registered, and hang or read elsewhere (pytorch/pytorch#158029). Remedy: unset "
            f"{_REGISTER}, or leave expandable_segments out of {' and '.join(_ALLOCATOR)}"
        )


def _has_nccl_ranks() -> bool:
    return any(
        "nccl" in backend.name()  # torch 2.15 calls it nccl2
        for group in all_groups()
        if group.size() > 1
        for backend in backends_of(group)
    )


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _has_expandable_segments() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
