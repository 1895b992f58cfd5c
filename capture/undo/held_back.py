"""Steps of optimizers that wait until nothing can refuse the iteration any more."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from graphfsdp._capture.trace.op_tensors import flat_tensors, is_empty, written_tensors
from graphfsdp._capture.trace.storages import identity_of

# They return nothing and write in place: only who looks at what they write can tell that they
# have not run. What may be wrong with the arguments of ours is found before they are called.
CHECKED_STEPS = ("graphfsdp::fused_adam_",)
FUSED_STEPS = (
    *CHECKED_STEPS,
    *("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"),
)
_COPIED_BYTES = 1 << 12  # of an argument: scales, flags, step counts, tables

_Arguments = tuple[Sequence[Any], Mapping[str, Any]]
_Call = tuple[torch._ops.OpOverload, Sequence[Any], Mapping[str, Any]]


class HeldBack:
    """Calls of fused steps, in their order, that were asked for and have not run.

    Note [Steps held back]: what an iteration writes is copied before, so that it can be undone.
    Of weights and state that is three times the weights with Adam: more than the activations of a
    small batch, and beside them the peak of the whole training. But they are written at the very
    end. So a fused step waits until the iteration is over, recorded and checked, when little is
    left in memory, and little that could fail. Then it runs, with copies if these do not raise the
    peak, and else without. Whoever touches what a waiting step writes, or writes what it reads,
    makes it run at once, with copies.

    Attributes:
        names: Operators that may wait.
    """

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self._calls: list[_Call] = []
        self._read: set[int] = set()  # identities of storages
        self._written: set[int] = set()

    def take(
        self,
        op: torch._ops.OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        made: AbstractSet[int],
    ) -> bool:
        """Hold a call back if it may wait, and nobody can tell.

        Args:
            op: The operator.
            args: Its arguments.
            kwargs: Likewise.
            made: Identities of storages that the iteration has made: whoever holds them changes
                what a recording takes for kept.
        """
        if op._schema.name not in self.names:
            return False
        written = set(map(identity_of, written_tensors(op, args, kwargs)))
        given = set(map(identity_of, flat_tensors([*args, *kwargs.values()])))
        if not self._written.isdisjoint(given - written):
            return False  # it reads what another one that waits will write
        read: set[int] = set()

        def hold(tensor: Tensor) -> Tensor:
            identity = identity_of(tensor)
            if identity in written:
                return tensor
            if tensor.nbytes <= _COPIED_BYTES:
                return tensor.clone()
            read.add(identity)
            return tensor

        held: _Arguments = tree_map_only(Tensor, hold, (list(args), dict(kwargs)))
        if (written | read) & made:
            return False
        self._calls.append((op, *held))
        self._written |= written
        self._read |= read
        return True

    def is_touched_by(
        self, op: torch._ops.OpOverload, given: Sequence[Tensor], written: Sequence[Tensor]
    ) -> bool:
        """Tell whether an operator would notice that a step has not run, or change what it reads.

        Args:
            op: The operator.
            given: All tensors that it is given.
            written: Those that it may write.
        """
        if not self._calls or (not written and (op.is_view or is_empty(op))):
            return False
        uses, writes = map(identity_of, given), map(identity_of, written)
        return not (self._written.isdisjoint(uses) and self._read.isdisjoint(writes))

    def written(self) -> list[Tensor]:
        """Return what the calls will write."""
        return [tensor for call in self._calls for tensor in written_tensors(*call)]

    def run(self) -> None:
        """Run the calls; no mode of this iteration must be active."""
        # As where they were called: nothing of autograd or autocast is left to be done.
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            for op, args, kwargs in self.let_go():
                op(*args, **kwargs)

    def let_go(self) -> list[_Call]:
        """Return the calls in their order, and forget them."""
        calls, self._calls = self._calls, []
        self._read.clear()
        self._written.clear()
        return calls
