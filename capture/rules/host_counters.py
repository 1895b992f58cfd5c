"""Numbers that an iteration changes in Python, and decides by."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn

from graphfsdp._capture.rules.decisions import Decision, decisions_of
from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import CaptureError

_Values = Mapping[str, object]  # numbers, strings and None by name


def plain_values(module: nn.Module) -> dict[str, object]:
    """Return what a module has that cannot be changed in place: counters, modes, names."""
    return {key: value for key, value in vars(module).items() if is_number(value)}


def is_number(value: object) -> bool:
    """Tell whether a value is plain: a number, a string, a bool, or None."""
    return value is None or isinstance(value, bool | int | float | str)


def refuse_deciding_counters(
    modules: Sequence[tuple[str, nn.Module]],
    before: Sequence[tuple[nn.Module, _Values]],
    find_decisions: Callable[[], Sequence[Decision]],
) -> Iterator[CaptureError]:
    """Yield a refusal of each number that the iteration has changed, and that decides what runs.

    Note [Counters that decide]: ``self.calls += 1`` is a statistic that a replay leaves alone; with
    ``if self.calls > 1000: ...`` in the same model it is a schedule that no replay would follow,
    and nothing that can be compared shows it before it is too late. So the code of the modules'
    classes is searched for such tests. A number that only grows never comes back to a limit that
    it has passed, so ``if self.calls == 0: ...`` may stay.

    Args:
        modules: All of them, with their paths.
        before: What those that may count had before the iteration.
        find_decisions: Returns where attributes of modules decide; called where one has changed.
    """
    changed = [
        (module, name, old, vars(module)[name])
        for module, values in before
        for name, old in values.items()
        # An evaluation changes the mode as well; and a mode is guarded.
        if name != "training" and name in vars(module) and differs(old, vars(module)[name])
    ]
    if not changed:
        return
    decisions = find_decisions()
    paths = {id(module): path for path, module in modules}
    for module, name, old, new in changed:
        for decision in decisions:
            is_its = decision.name == name and isinstance(module, decision.kind or nn.Module)
            if is_its and decision.may_turn(old, new, module):
                path = paths.get(id(module), "")
                title = f"{path}.{name}" if path else name
                yield refusal(title, decision, old, new, path)
                break


def decisions_in_classes(modules: Iterable[nn.Module]) -> list[Decision]:
    """Return where the code of the modules' classes decides by an attribute."""
    kinds = dict.fromkeys(map(type, modules))
    return [decision for kind in kinds for decision in decisions_of(kind)]


def differs(old: object, new: object) -> bool:
    """Tell whether a plain value is another plain value now."""
    if not is_number(new):
        return False
    return type(old) is not type(new) or (old != new and old == old)


def refusal(
    title: str, decision: Decision, old: object, new: object, path: str | None
) -> CaptureError:
    """Return the refusal of a number that the iteration counts and decides by.

    Args:
        title: Its name.
        decision: Where it decides.
        old: The number before the iteration.
        new: The number behind it.
        path: Of the module that it belongs to.
    """
    return CaptureError(
        f"the iteration changes {title!r} in Python (from {old!r} to {new!r}) and decides by it "
        "what runs; a replay runs no Python, so the number would stay, and the decision with it. "
        "Remedy: decide in the loop and tell the model by an attribute, which is guarded "
        "(on_change='recapture' captures anew when it changes); or count in a tensor (a buffer, "
        "add_) and choose with torch.where. A number that nothing is decided by may stay",
        kind=HazardKind.CONTROL_FLOW,
        module_path=path,
        source=decision.source,
    )
