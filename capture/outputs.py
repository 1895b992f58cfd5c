"""What an iteration returns, as the flat list of tensors that a graph knows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Results:
    """The form of an iteration's output."""

    def __init__(self) -> None:
        self._spec: pytree.TreeSpec | None = None
        self._is_tensor: list[bool] = []  # by leaf of the output; the others are None
        self._is_single = False

    def flatten(self, output: Any) -> list[Tensor]:
        """Remember the form of an output, and return its tensors."""
        leaves, self._spec = pytree.tree_flatten(output)
        self._is_single = isinstance(output, Tensor)  # the usual one: a loss alone
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def unflatten(self, results: Sequence[Tensor]) -> tuple[Any, Tensor | None]:
        """Return the output that these tensors make, and the one that follows them, if any."""
        assert self._spec is not None
        if self._is_single:
            return results[0], results[1] if len(results) > 1 else None
        num_outputs = sum(self._is_tensor)
        tensors = iter(results[:num_outputs])
        leaves = [next(tensors) if is_tensor else None for is_tensor in self._is_tensor]
        more = results[num_outputs] if len(results) > num_outputs else None
        return pytree.tree_unflatten(leaves, self._spec), more
