"""Casts of weights that torch.autocast makes once in a block, for all who use them.

Note [Casts are inputs]: what comes of all uses of such a cast is added up before it is cast back.
So a part whose weights the loop uses as well, in the same block, may not cast them within its
graph: it takes autocast's own casts, as it takes inputs, and hands their gradients to them.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from graphfsdp.in_place.part_backward import nodes_behind

# torch has nothing that asks for a cast itself. By dimensions of a weight: what multiplies with it
# and is cast, and the name under which its backward pass has the weight.
_SAVED_BY: Mapping[int, tuple[Callable[..., Tensor], str]] = MappingProxyType(
    {
        1: (torch.matmul, "_saved_vec"),
        2: (torch.matmul, "_saved_mat2"),
        3: (torch.conv1d, "_saved_weight"),
        4: (torch.conv2d, "_saved_weight"),
        5: (torch.conv3d, "_saved_weight"),
    }
)


class Casts:
    """Some weights that are cast, and how their casts in the block that is open are got at.

    Attributes:
        weights: All of them.
    """

    def __init__(self, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.weights = weights
        self._dtype = dtype
        self._takes = [_take(weight, dtype) for weight in weights]

    def __call__(self) -> list[Tensor]:
        """Return the casts, which are made where nobody has yet."""
        return [take() for take in self._takes]

    def of(self, others: Sequence[Tensor]) -> "Casts":
        """Return those of other weights of the same shapes."""
        return Casts(others, self._dtype)


def casts_behind(results: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> Casts:
    """Find the weights whose casts these results have been made of, in the block that is open."""
    own = {id(weight): weight for weight in weights if weight.dim() in _SAVED_BY}
    found: dict[int, Tensor] = {}
    for node in nodes_behind(results):
        if node.name() != "ToCopyBackward0":
            continue
        ((following, _),) = node.next_functions
        weight = own.get(id(getattr(following, "variable", None)))
        # The module may as well have cast it by itself.
        if weight is not None and Casts([weight], dtype)()[0].grad_fn is node:
            found[id(weight)] = weight
    return Casts(list(found.values()), dtype)


def _take(weight: Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    """Return what gets a cast: a product of nothing with the weight, which has saved it."""
    sizes = weight.shape[:1] if weight.dim() < 3 else weight.shape[1:]
    nothing = torch.empty(0, *sizes, dtype=dtype, device=weight.device, requires_grad=True)
    product, saved = _SAVED_BY[weight.dim()]
    return lambda: getattr(product(nothing, weight).grad_fn, saved)
