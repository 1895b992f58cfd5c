"""Names for the memory that a recording found there: weights, gradients, states, inputs."""

import enum
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from graphfsdp._capture.gradients import PersistentGradients
from graphfsdp._capture.inputs import StaticInputs
from graphfsdp._capture.trace.storages import span
from graphfsdp.base.capturable import CapturableOptimizer
from graphfsdp.base.dtensors import local_part


class Role(enum.Enum):
    """What a stretch of memory is to the training program."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    STATE = "optimizer state"
    BUFFER = "buffer"
    INPUT = "static input"
    KEPT = "kept by the model"
    OTHER = "other memory from before the capture"
    INTERMEDIATE = "intermediate"
    OUTPUT = "result"


@dataclass(frozen=True, slots=True)
class NamedMemory:
    """A tensor's memory.

    Attributes:
        start: Address of its first byte.
        end: Address after its last byte.
        role: What it is.
        name: Full name.
    """

    start: int
    end: int
    role: Role
    name: str


class MemoryNames:
    """Finds who owns an address. Holds integers and strings, no tensor."""

    def __init__(self, tensors: Iterable[tuple[Role, str, Tensor]]) -> None:
        """Note the addresses that tensors have now.

        Args:
            tensors: Role, full name, tensor; of two at one address the first counts.
        """
        found: dict[tuple[int, int], NamedMemory] = {}
        for role, name, tensor in tensors:
            local = local_part(tensor)
            if local.numel() == 0:
                continue
            start = local.data_ptr()
            end = start + span(local.shape, local.stride()) * local.element_size()
            found.setdefault((start, end), NamedMemory(start, end, role, name))
        self._items = sorted(found.values(), key=lambda item: (item.start, -item.end))
        self._starts = [item.start for item in self._items]

    def find(self, address: int, num_bytes: int) -> tuple[Role, str]:
        """Return role and name of the memory at an address.

        Args:
            address: First byte.
            num_bytes: How many follow; several neighbours are counted, and the first is named.
        """
        first = max(bisect_right(self._starts, address) - 1, 0)
        inside = [
            item
            for item in self._items[first : bisect_right(self._starts, address + num_bytes)]
            if item.start < address + num_bytes and address < item.end
        ]
        if not inside:
            return Role.OTHER, ""
        item = inside[0]
        if len(inside) > 1:
            return item.role, f"{item.name} and {len(inside) - 1} more behind it"
        whole = item.start == address and item.end <= address + num_bytes
        return item.role, item.name if whole else f"part of {item.name}"


def memory_names(
    model: nn.Module,
    optimizer: CapturableOptimizer,
    gradients: PersistentGradients,
    inputs: StaticInputs | None,
) -> MemoryNames:
    """Return the names of everything that a captured step works on."""

    def tensors() -> Iterator[tuple[Role, str, Tensor]]:
        for name, param in model.named_parameters():
            yield Role.PARAMETER, name, param
        for name, view in gradients.named_views():
            yield Role.GRADIENT, f"gradient of {name}", view
        for name, buffer in model.named_buffers():
            yield Role.BUFFER, name, buffer
        for name, state in optimizer.state_tensors():
            yield Role.STATE, name, state
        for name, tensor in () if inputs is None else inputs.named_tensors():
            yield Role.INPUT, name, tensor

    return MemoryNames(tensors())
