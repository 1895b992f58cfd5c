"""Where each operator of a recording comes from: phase, module, line of the user's program."""

import enum
import sys
from dataclasses import dataclass
from types import CodeType

import torch
from torch import nn

from graphfsdp._capture.trace.source import ModuleTracker, is_users_file
from graphfsdp.base.hazards import SourceLine

_NO_SEQUENCE = 2**64 - 1  # what AccumulateGrad has instead of a number of its own


class OpPhase(enum.Enum):
    """The part of an iteration that an operator belongs to."""

    FORWARD = "forward"  # modules, loss function, and whatever runs with gradients enabled
    BACKWARD = "backward"  # inside a node of autograd, recomputation and gradient hooks included
    OPTIMIZER = "optimizer"  # after a backward pass, gradients disabled: norm, clip, step, EMA


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the user's program.

    Attributes:
        phase: Part of the iteration.
        module: Full name of the module, "" for the root, None outside any. In a backward pass
            that of the forward operator whose gradient is computed, or of a parameter's owner.
        source: The user's line; in a backward pass that of the forward operator.
    """

    phase: OpPhase
    module: str | None
    source: SourceLine | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A site before it has a number; hashable and cheap to make."""

    phase: OpPhase
    module: str | None
    code: CodeType | None
    line: int


class SiteTable:
    """Numbers the sites of a recording; an operator remembers a number.

    Note [Names in a backward pass]: autograd gives its nodes rising sequence numbers. A forward
    operator is dispatched right after its node was made, so the first operator seen under a
    number is the node's, and in the backward pass the running node's number leads back to it.
    """

    def __init__(self, model: nn.Module, tracker: ModuleTracker) -> None:
        self._tracker = tracker
        self._numbers: dict[_Place, int] = {}
        self._forward_sites: dict[int, _Place] = {}  # by autograd's sequence number
        self._owners = {
            id(param): path
            for path, module in model.named_modules()
            for param in module.parameters(recurse=False)
        }
        self._is_users: dict[str, bool] = {}  # by file name
        self._ran_backward = False

    def here(self) -> int:
        """Return the number of the running program's place."""
        place = self._place()
        return self._numbers.setdefault(place, len(self._numbers))

    def sites(self) -> tuple[Site, ...]:
        """Return the sites by number."""
        return tuple(Site(place.phase, place.module, _source_of(place)) for place in self._numbers)

    def _place(self) -> _Place:
        module = self._tracker.path
        node = torch._C._current_autograd_node()
        if node is not None:
            self._ran_backward = True
            return self._backward_place(node, module)
        if module is not None:
            self._ran_backward = False
        after = self._ran_backward and module is None and not torch.is_grad_enabled()
        code, line = self._users_line()
        place = _Place(OpPhase.OPTIMIZER if after else OpPhase.FORWARD, module, code, line)
        self._forward_sites.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _backward_place(self, node: torch.autograd.graph.Node, module: str | None) -> _Place:
        if module is not None:  # recomputation runs modules again
            code, line = self._users_line()
            return _Place(OpPhase.BACKWARD, module, code, line)
        number = node._sequence_nr()
        if number == _NO_SEQUENCE:
            owner = self._owners.get(id(getattr(node, "variable", None)))
            return _Place(OpPhase.BACKWARD, owner, None, 0)
        origin = self._forward_sites.get(number)
        if origin is None:
            return _Place(OpPhase.BACKWARD, None, None, 0)
        return _Place(OpPhase.BACKWARD, origin.module, origin.code, origin.line)

    def _users_line(self) -> tuple[CodeType | None, int]:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            known = self._is_users.get(code.co_filename)
            if known is None:
                known = self._is_users[code.co_filename] = is_users_file(code.co_filename)
            if known:
                return code, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return None, 0


def _source_of(place: _Place) -> SourceLine | None:
    if place.code is None:
        return None
    return SourceLine(place.code.co_filename, place.line, place.code.co_qualname)
