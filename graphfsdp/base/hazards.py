"""What a graph cannot hold: kinds of hazards, and one hazard with its place."""

import dataclasses
import enum
import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class HazardKind(enum.Enum):
    """What is wrong with an operation, or with the settings, of an iteration."""

    HOST_READ = "host-read"  # a value of the iteration is read by Python
    DYNAMIC_SHAPE = "dynamic-shape"  # a shape depends on values
    HOST_TENSOR = "host-tensor"  # made in host memory in each iteration, then moved
    BAKED_NUMBER = "baked-number"  # a Python number that changes, or is meant to change
    GENERATOR = "generator"  # the state of a random generator is read, set or new
    RECOMPUTE = "recompute"  # something random inside a recomputed region
    STREAM = "stream"  # a side stream that does not fork from the iteration and rejoin it
    SYNCHRONIZE = "synchronize"  # the host waits for the device
    COLLECTIVE = "collective"  # a collective whose effects cannot be recorded
    CONTROL_FLOW = "control-flow"  # Python decides what runs
    COMPILED = "compiled"  # a region made by torch.compile
    HIDDEN_WRITE = "hidden-write"  # memory is written without an operator that says so
    MEMORY = "memory"  # memory without a fixed address
    STATE = "state"  # tensors are replaced instead of updated
    THREAD = "thread"  # work on another Python thread
    GRADIENT = "gradient"  # a gradient that is missing, or computed on the host
    OPTIMIZER = "optimizer"  # the optimizer cannot be captured
    PRECISION = "precision"  # two dtype settings clash
    CONFIG = "config"  # an argument cannot work
    LOSS = "loss"  # loss_fn returns what cannot be trained on
    EXCEPTION = "exception"  # the iteration itself fails


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def text(self) -> str:
        """The line itself, "" where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Hazard:
    """One thing that a graph cannot hold.

    Attributes:
        kind: What sort of thing.
        why: Why a graph cannot hold it.
        fix: What to do.
        op: The operation, such as ``aten._local_scalar_dense.default``; None if it is none.
        module_path: Full name of the module that was running, "" for the root, None outside any.
        source: The user's line; None if there is none.
        cuda_error: Number of the CUDA error that it would cause, None if there is none.
        count: How often one iteration meets it.
    """

    kind: HazardKind
    why: str
    fix: str
    op: str | None = None
    module_path: str | None = None
    source: SourceLine | None = None
    cuda_error: int | None = None
    count: int = 1

    def to_json(self) -> Mapping[str, Any]:
        """Return plain numbers and strings."""
        source = self.source
        return {
            "kind": self.kind.value,
            "op": self.op,
            "module": self.module_path,
            "file": None if source is None else source.file,
            "line": None if source is None else source.line,
            "function": None if source is None else source.function,
            "text": None if source is None else source.text,
            "why": self.why,
            "fix": self.fix,
            "cuda_error": self.cuda_error,
            "count": self.count,
        }


class HazardLog:
    """Hazards in the order in which they were met; the same one twice is one, counted."""

    def __init__(self) -> None:
        self._counts: dict[Hazard, int] = {}

    def add(self, hazard: Hazard, *, is_echo: bool = False) -> None:
        """Note a hazard; an echo is one that was met in a backward pass.

        If its line has told the same kind in the forward pass, it is that one's.
        """
        single = dataclasses.replace(hazard, count=1)
        if is_echo and hazard.source is not None:
            for known in self._counts:
                if (known.kind, known.source) == (hazard.kind, hazard.source):
                    single = known
        self._counts[single] = self._counts.get(single, 0) + hazard.count

    def __iter__(self) -> Any:
        return iter(dataclasses.replace(h, count=n) for h, n in self._counts.items())

    def __len__(self) -> int:
        return len(self._counts)
