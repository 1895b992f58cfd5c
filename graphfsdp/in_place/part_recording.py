"""Records what a part does, so that a recording that is given up leaves everything as it was."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp._capture.guards.guards import Guards
from graphfsdp._capture.trace.backend import Graph, GraphBackend, Iterate
from graphfsdp._capture.trace.source import Ran
from graphfsdp._capture.undo.host_state import Attempt
from graphfsdp._capture.undo.interrupts import is_of_handler
from graphfsdp.base.op_tensors import as_written
from graphfsdp.errors import CaptureError, Hazard, first_line


class NotAPartError(Exception):
    """Why a module, or a pass through it, runs as it is written.

    Attributes:
        hazard: What of it no graph holds; None if that is not why.
    """

    def __init__(self, why: str, hazard: Hazard | None = None) -> None:
        super().__init__(why)
        self.hazard = hazard


def has_own_memory(tensor: Tensor) -> bool:
    """Tell whether no two elements of a tensor lie in one place, as those of ``expand`` do."""
    end = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if step <= end:
                return False
            end += (size - 1) * step
    return True


def guards_of(module: nn.Module, device: torch.device, ran: Ran) -> Guards:
    """Return what looks at all that a call of a module reads in Python."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    return Guards(
        module,
        params,
        lambda: [],
        optimizers=(),
        functions=(),
        device=device,
        ran=ran,
    )


def recorded(
    module: nn.Module,
    backend: GraphBackend,
    ran: Ran,
    iterate: Iterate,
    *,
    state: Iterable[Tensor] = (),
    given: Iterable[Tensor] = (),
    refuse_more: Callable[[], None] = lambda: None,
) -> tuple[Graph, list[Tensor], Guards]:
    """Record a pass through a module that takes effect once; return its results, and its guards.

    Args:
        module: Whose pass it is.
        backend: Of its device.
        ran: Code that it has run before, to which ``iterate`` adds its own.
        iterate: The pass.
        state: What it may write of the module's.
        given: What it is called with, which it must not write into.
        refuse_more: NotAPartError for what nothing else tells; called at the end.

    Raises:
        NotAPartError: no graph holds it, and everything is as it was.
    """
    held = [dict(vars(each)) for each in module.modules()]
    attempt = Attempt(
        module,
        (),
        backend.begin_undo(state),
        device=backend.device,
        restore_gradients=lambda: None,
    )
    guards = guards_of(module, backend.device, ran)
    graph: Graph | None = None

    def check(was_read: Callable[[Tensor], bool]) -> None:
        attempt.host_state.check_unchanged(was_read)
        refuse_more()
        _check_attributes(module, held)
        guards.arm(was_read)
        if guards.moves:
            raise NotAPartError(f"it moves Python: {guards.moves[0]}")
        for told in ran.asked:
            raise NotAPartError(f"{told}, and what follows from it would stay as it is")

    try:
        with ExitStack() as stack:
            if backend.device.type == "cpu":
                stack.enter_context(as_written())
            stack.enter_context(attempt.watching())
            stack.enter_context(guards.recording())
            versions = [(tensor, tensor._version) for tensor in given]
            graph, results = backend.record(iterate, module, check, collective=False, scratch=())
        if any(tensor._version != version for tensor, version in versions):
            raise NotAPartError("it writes into an input")
        if any("c10d" in op.partition(".")[0] for op in graph.facts.op_counts):
            raise NotAPartError("it has collectives, in which all ranks must take part alike")
    except BaseException as error:
        if graph is not None:
            graph.close()
        attempt.roll_back()
        guards.put_back()
        # What comes from outside is no business of a recording's, and the loop's as ever.
        if not isinstance(error, Exception) or is_of_handler(error):
            raise
        if isinstance(error, NotAPartError):
            raise
        if not isinstance(error, CaptureError):
            raise NotAPartError(first_line(error)) from error
        where = "" if error.source is None else f" ({error.source})"
        raise NotAPartError(f"{error.hazard.why}{where}", error.hazard) from error
    return graph, results, guards


def _check_attributes(module: nn.Module, held: Sequence[Mapping[str, Any]]) -> None:
    for (path, each), was in zip(module.named_modules(), held, strict=True):
        now = vars(each)
        for name in now.keys() | was.keys():
            if now.get(name) is not was.get(name):
                raise NotAPartError(f"it writes {f'{path}.{name}'.lstrip('.')!r}")
