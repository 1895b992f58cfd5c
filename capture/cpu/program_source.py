"""Source of a straight-line program, compiled while it is written."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

Replay = Callable[[], tuple[Tensor, ...]]

_PART_LINES = 64
_Held = list[Any]  # what one part hands to the next


class ProgramSource:
    """Takes a program's lines in order and becomes the function that runs them.

    Note [Parts]: Python's compiler needs about four kilobytes for each line while it works, more
    than the program ever holds. So every few lines become a function of their own. What a later
    part needs is handed over in a list that is emptied at once: nobody but the part that runs
    holds a tensor, so that ``del`` in it frees.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        """Prepare.

        Args:
            namespace: Objects that the lines name, by name; may grow meanwhile.
        """
        self._namespace = namespace
        self._lines: list[str] = []
        self._parts: list[Callable[[_Held], Any]] = []
        self._live: dict[str, None] = {}  # local names that are bound, in order
        self._taken: tuple[str, ...] = ()  # those that were bound before this part

    def add(self, line: str, makes: Iterable[str] = ()) -> None:
        """Append a statement.

        Args:
            line: Its source, on one line.
            makes: Local names that it binds and that a later line may read.
        """
        if len(self._lines) >= _PART_LINES:
            names = tuple(self._live)
            self._end_part(f"held.extend({_tuple(names)})")
            self._taken = names
        self._lines.append(line)
        self._live.update(dict.fromkeys(makes))

    def drop(self, names: Iterable[str]) -> None:
        """Append statements that let go of local names."""
        names = tuple(names)
        self.add("del " + ", ".join(names))
        for name in names:
            del self._live[name]

    def finish(self, results: Iterable[str]) -> Replay:
        """Return the function; it returns what these names stand for."""
        self._end_part(f"return {_tuple(results)}")
        return _joined(self._parts)

    def _end_part(self, last_line: str) -> None:
        begin = [f"[{', '.join(self._taken)}] = held", "held.clear()"]
        lines = [*begin, *self._lines, last_line]
        code = compile(
            "\n    ".join(["def replay(held):", *lines]), "<graphfsdp cpu graph>", "exec"
        )
        exec(code, self._namespace)
        # Popped: a namespace that holds its own function is a cycle, freed only by the collector.
        self._parts.append(self._namespace.pop("replay"))
        self._lines = []


def _joined(parts: list[Callable[[_Held], Any]]) -> Replay:
    *first, last = parts

    def replay() -> tuple[Tensor, ...]:
        held: _Held = []
        for part in first:
            part(held)
        results: tuple[Tensor, ...] = last(held)
        return results

    return replay


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(name + ', ' for name in names)})"
