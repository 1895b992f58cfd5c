"""Which gradients an earlier iteration has left, for one that is captured begins without any."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from graphfsdp.errors import CaptureError
from graphfsdp.in_place.calls import MOST_NEW, refusal


class GradientsLeft:
    """Follows what the loop zeroes and looks at, by the ids of parameters.

    Gradients of parameters that are never stepped may run on, where nobody looks at them.
    """

    def __init__(self, params: Mapping[int, Tensor], held: Iterable[Tensor]) -> None:
        """``held`` are those of the optimizers."""
        self._params = params
        self._held = frozenset(map(id, held))
        self._left: dict[int, Tensor] = {}  # have one, and nobody has zeroed it
        self._overwritten: set[int] = set()  # of these by a replay, which does not add to them
        self._looked_at: set[int] = set()  # whose gradients the loop has asked for
        self._dropped: list[Tensor] = []  # whose gradients the iteration takes off

    def begin(self) -> None:
        """Forget those that somebody has taken off."""
        self._left = {key: p for key, p in self._left.items() if p.grad is not None}
        self._dropped = []

    def zero(self, params: Iterable[Tensor], *, drops: bool) -> None:
        """Note that the loop zeroes gradients; ``drops``: by taking them off."""
        for param in params:
            if drops:
                self._dropped.append(param)
            self._left.pop(id(param), None)
            self._overwritten.discard(id(param))

    def drop(self) -> None:
        """Take off what the iteration takes off, for whoever has kept the last ones."""
        for param in self._dropped:
            param.grad = None

    def look_at(self, params: Iterable[Tensor]) -> None:
        self._looked_at.update(map(id, params))

    def leave(self) -> None:
        """Note that an iteration is over, and nobody has zeroed anything."""
        self._left, self._looked_at = dict(self._params), set()

    def used(self) -> list[int]:
        """Return those that the iteration has used though they were left."""
        return [key for key in self._left if key in self._held or key in self._looked_at]

    def lost(self) -> int | None:
        """Return one that is used and to which replays have not added."""
        return next((key for key in self.used() if key in self._overwritten), None)

    def overwrite(self) -> None:
        """Note that a replay overwrites what is left."""
        self._overwritten |= self._left.keys()


def of_gradients(name: str) -> CaptureError:
    """Return an error for a loop that uses a gradient which runs on."""
    return refusal(
        "gradients were not zeroed (by zero_grad, or as p.grad = None) since the optimizer's last "
        f"step, that of {name} for one; a captured iteration begins without any, so it ran as "
        f"written, and {MOST_NEW + 1} in a row are refused",
        "optimizer.zero_grad() in each iteration, and where the loop uses gradients of what it "
        "does not train (in a norm), zero_grad() of the model, or requires_grad_(False)",
    )


def params_of(owner: nn.Module | torch.optim.Optimizer) -> Iterable[Tensor]:
    if isinstance(owner, nn.Module):
        return owner.parameters()
    return (param for group in owner.param_groups for param in group["params"])
