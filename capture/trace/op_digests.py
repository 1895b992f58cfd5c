"""What every operator of a run has computed, as digests, and where two runs part."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.op_tensors import OpCall, OperatorMode, is_empty

# A program has some of its own: for constants, for what outlives it, for ones_like and its kin.
_OWN = frozenset({"copy", "clone", "fill", "zero"})


@dataclass(frozen=True, slots=True)
class OpDigest:
    """One operator call.

    Attributes:
        name: The operator without overload and in-place mark: ``add``, ``add_`` and ``add.out``
            are one.
        shapes: Of the tensors that it made or wrote; none for one that has computed nothing.
        digest: Of their contents.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    digest: bytes


class OpDigests(OperatorMode):
    """Takes the digest of everything that operators compute while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OpDigest] = []

    def on_op(self, call: OpCall) -> Any:
        result = call.run()
        if call.op.namespace != "profiler":
            self.calls.append(_digest_of(call, result))
        return result


def first_other(eager: Sequence[OpDigest], replay: Sequence[OpDigest]) -> int | None:
    """Return the index of the first call that computed something else than the eager run.

    A replay calls fewer operators: what nobody reads is left out, constants and views are made
    once. So each of its calls is looked up among the eager ones that are left.
    """
    start = 0
    for index, call in enumerate(replay):
        if not call.shapes:
            continue
        like = [
            position
            for position in range(start, len(eager))
            if eager[position].name == call.name and eager[position].shapes == call.shapes
        ]
        same = next((pos for pos in like if eager[pos].digest == call.digest), None)
        if same is not None:
            start = same + 1
        elif like or call.name not in _OWN:
            return index
    return None


def base_name(name: str) -> str:
    """Return the name of an operator without overload and in-place mark."""
    return name.partition(".")[0].rstrip("_")


def _digest_of(call: OpCall, result: Any) -> OpDigest:
    name = base_name(call.schema_name.partition("::")[2])
    has_contents = not is_empty(call.op) and name != "resize"
    made = [tensor for tensor, _ in call.made(result)]
    # In another order where the results are among the arguments (out=), so sorted.
    parts = sorted(
        (tuple(tensor.shape), contents_digest(tensor))
        for tensor in ([*call.written, *made] if has_contents else [])
    )
    digest = hashlib.blake2b(b"".join(contents for _, contents in parts)).digest()
    return OpDigest(name, tuple(shape for shape, _ in parts), digest)


def contents_digest(tensor: Tensor) -> bytes:
    if tensor.layout is not torch.strided:
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    numbers: Any = plain.reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(memoryview(numbers)).digest()
