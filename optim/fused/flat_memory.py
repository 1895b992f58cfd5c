"""Tensors as stretches of flat memory: dense ones, and slices of a common buffer."""

from collections.abc import Callable, Sequence

from torch import Tensor

# Tensors start on a border of this many elements, which is a multiple of 16 bytes in every dtype.
BORDER_NUMEL = 64


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """All elements in one stretch, each once; channels-last tensors are, expanded ones are not."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Equal positions in memory are equal indices; strides of dims of size one say nothing."""
    return tensor.shape == other.shape and all(
        a == b
        for a, b, size in zip(tensor.stride(), other.stride(), tensor.shape, strict=True)
        if size != 1
    )


def flat_view(tensor: Tensor, numel: int | None = None) -> Tensor:
    """The 1-D view in memory order; a longer one reaches into neighbours in the same storage."""
    length = tensor.numel() if numel is None else numel
    return tensor.detach().as_strided((length,), (1,), tensor.storage_offset())


def slices_like(
    tensors: Sequence[Tensor],
    allocate: Callable[[int], Tensor],  # makes a 1-D buffer of so many elements
) -> list[Tensor]:
    """Tensors shaped and strided like these in one buffer, each on a border."""
    offsets: list[int] = []
    end = 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.numel() // BORDER_NUMEL) * BORDER_NUMEL
    buffer = allocate(end)
    return [
        buffer.as_strided(tensor.shape, tensor.stride(), offset)
        if is_dense(tensor.shape, tensor.stride())
        else buffer[offset : offset + tensor.numel()].view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def joined(scalars: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return 1-D views of [] tensors, neighbours in one view, and each one's place in all views."""
    order = sorted(range(len(scalars)), key=lambda index: _place(scalars[index]))
    stretches: list[list[Tensor]] = []
    places = [0] * len(scalars)
    for place, index in enumerate(order):
        scalar = scalars[index]
        if stretches and _continues(stretches[-1][-1], scalar):
            stretches[-1].append(scalar)
        else:
            stretches.append([scalar])
        places[index] = place
    return [flat_view(stretch[0], len(stretch)) for stretch in stretches], places


def _continues(left: Tensor, right: Tensor) -> bool:
    """Tell whether a tensor starts where another one of its dtype ends, in the same storage."""
    address, offset = _place(left)
    follows = (address, offset + left.numel()) == _place(right)
    return follows and left.dtype == right.dtype


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
