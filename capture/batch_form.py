"""The nesting of a batch in plain tuples, lists and dicts, walked without torch's pytree."""

from collections.abc import Iterable, Sequence
from typing import Any


class BatchForm:
    """Takes the leaves out of batches that are nested like the first one.

    Most batches are a tensor, or a dict or tuple of some. pytree, which knows many more containers,
    takes as long for them as a small graph for its replay. Only what is nested in exactly these
    types, with keys in the same order, is walked here; ``leaves`` leaves the rest to pytree.
    """

    def __init__(self, batch: object) -> None:
        """Remember the nesting.

        Args:
            batch: Arguments and keyword arguments of a call.
        """
        self._type = type(batch)
        self._keys: list[Any] | None = None
        self._inner: list[BatchForm] | None = None
        if isinstance(batch, dict):
            self._keys = list(batch)
            self._inner = [BatchForm(value) for value in batch.values()]
        elif isinstance(batch, tuple | list):
            self._inner = [BatchForm(value) for value in batch]

    @classmethod
    def of(cls, batch: object, leaves: Sequence[Any]) -> "BatchForm | None":
        """Return the form of a batch, or None where pytree finds other leaves in it.

        Args:
            batch: Arguments and keyword arguments of a call.
            leaves: What pytree finds.
        """
        form = cls(batch)
        found = form.leaves(batch) if form._is_plain() else None
        return form if found is not None and [*map(id, found)] == [*map(id, leaves)] else None

    def leaves(self, batch: object) -> list[Any] | None:
        """Return the leaves of a batch in pytree's order, or None if it is nested otherwise."""
        found: list[Any] = []
        return found if self._walk(batch, found) else None

    def _is_plain(self) -> bool:
        if self._inner is None:
            return True
        return self._type in (tuple, list, dict) and all(form._is_plain() for form in self._inner)

    def _walk(self, batch: Any, found: list[Any]) -> bool:
        if self._inner is None:
            found.append(batch)
            return True
        kind: type[Any] = type(batch)
        if kind is not self._type or len(batch) != len(self._inner):
            return False
        values: Iterable[Any] = batch
        if self._keys is not None:
            if list(batch) != self._keys:
                return False
            values = batch.values()
        return all(form._walk(each, found) for form, each in zip(self._inner, values, strict=True))
