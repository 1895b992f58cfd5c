"""What has changed between two replays although the graph has it baked in, in structured form."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from graphfsdp.errors import GuardError

_MAX_SHOWN = 8


class ChangeKind(enum.Enum):
    """What sort of change a ``GuardError`` tells of."""

    ADDRESS = "address"  # a tensor lies in other memory, or is another object
    LAYOUT = "layout"  # same memory, other shape, strides or dtype
    REQUIRES_GRAD = "requires_grad"
    STRUCTURE = "structure"  # a module, parameter or buffer was added, removed or replaced
    MODE = "mode"  # train or eval
    HOOK = "hook"
    ATTRIBUTE = "attribute"  # a number, string or generator that a module holds
    OPTIMIZER_STATE = "optimizer_state"
    GROUPS = "groups"  # the optimizer's parameter groups
    BAKED_VALUE = "baked_value"  # a number in a parameter group
    SETTING = "setting"  # a switch of torch, such as autocast


@dataclass(frozen=True)
class Change:
    """What is not as it was when captured; ``remedy`` is what to do other than capture again."""

    kind: ChangeKind
    name: str
    old: str
    new: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} was {self.old} when the iteration was captured, and is now {self.new}"


def refuse(
    changes: Sequence[Change],
    why: str = "a replay would not see this, so it was not run",
    otherwise: str = "; or capture again, as on_change='recapture' does",
) -> None:
    """Raise a GuardError that names and holds all changes, if there are any.

    ``otherwise`` ends the remedy.
    """
    if not changes:
        return
    remedies = "; ".join(dict.fromkeys(change.remedy for change in changes[:_MAX_SHOWN]))
    lines = [str(change) for change in changes[:_MAX_SHOWN]]
    if len(changes) > _MAX_SHOWN:
        lines.append(f"and {len(changes) - _MAX_SHOWN} more")
    text = f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n  {line}" for line in lines) + "\n"
    raise GuardError(f"{why}:{text}Remedy: {remedies}{otherwise}", changes)
