"""What a graph cannot hold, and exceptions: each says what is wrong, expected, got, the remedy."""

import dataclasses
import enum
import linecache
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


class Choice(enum.Enum):
    """An argument that has a few values by name."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """Return the member of that value; ConfigError: there is none."""
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(repr(member.value) for member in cls)
            name = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")
            raise ConfigError(f"unknown {name} {value!r}; expected one of {known}") from None


class HazardKind(Choice):
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
    def shown(self) -> str:
        """File, as from here or from where libraries are, number and text."""
        file = self.file.rpartition(f"-packages{os.sep}")[2]
        return f"{file.removeprefix(f'{os.getcwd()}{os.sep}')}:{self.line} {self.text}"

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
        plain = dataclasses.asdict(self) | {"kind": self.kind.value}
        where = plain.pop("source") or dict.fromkeys(("file", "line", "function"))
        where["text"] = None if self.source is None else self.source.text
        plain["module"] = plain.pop("module_path")
        return plain | where


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


class GraphFSDPError(Exception):
    """Base of every exception that graphfsdp raises on purpose."""


class ConfigError(GraphFSDPError, ValueError):
    """An argument or a combination of arguments that cannot work."""


class PrecisionError(ConfigError):
    """The optimizer would read a casted copy of a gradient, not the persistent buffer."""


class BatchMismatchError(GraphFSDPError, ValueError):
    """A batch differs from the one the graph was made for; the message names the leaf."""


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


class GuardError(GraphFSDPError, RuntimeError):
    """Something that the graph has baked in was changed between two replays.

    Attributes:
        changes: Every change (``graphfsdp.errors.Change``), in the order of the message.
    """

    def __init__(self, message: str, changes: Sequence[Change] = ()) -> None:
        super().__init__(message)
        self.changes = tuple(changes)


class RankFailedError(GraphFSDPError, RuntimeError):
    """Another rank failed in a replay, so this one has undone its own; the message names it."""


class PhaseError(GraphFSDPError, RuntimeError):
    """A call that the present phase of a captured step does not allow."""


def broken(why: str) -> PhaseError:
    """Return the refusal of a captured step that cannot go on."""
    return PhaseError(f"this captured step is broken: {why}")


class NotCopyableError(GraphFSDPError, TypeError):
    """Something that is bound to its process and its addresses was to be pickled or copied."""


class InvalidLossError(GraphFSDPError, ValueError):
    """``loss_fn`` returned something that cannot be trained on.

    Attributes:
        source: Where ``loss_fn`` (or the model, without one) is defined, None if unknown.
    """

    def __init__(self, message: str, *, source: SourceLine | None = None) -> None:
        super().__init__(message if source is None else f"{message}\n  source: {source}")
        self.message = message
        self.source = source


class CheckpointError(GraphFSDPError):
    """A checkpoint cannot be written or read; the message names the file and the reason."""


class CheckpointDamagedError(CheckpointError):
    """What is stored differs from what was saved; each damaged tensor and file is named."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit to what it is loaded into; the whole difference is listed."""


class VerificationError(GraphFSDPError, RuntimeError):
    """A replay and an eager run from the same state did not agree bit for bit.

    Attributes:
        tensor: Name of the first tensor that differs: outputs, then gradients, then state.
        max_difference: Largest absolute difference in it; NaN where only one side is NaN.
    """

    def __init__(self, message: str, *, tensor: str, max_difference: float) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.max_difference = max_difference


class CaptureError(GraphFSDPError):
    """The iteration does something that a graph cannot hold.

    Not a RuntimeError on purpose: a model that catches RuntimeError around a forward pass must
    not swallow it.

    Attributes:
        op: Name of the operation that was refused, such as ``aten._local_scalar_dense``.
        module_path: Full name of the module that was running, "" for the root, None if none was.
        source: The user's line that asked for the operation, None if there is none.
        kind: What sort of thing a graph cannot hold.
        cuda_error: Number of the CUDA error that a capture on a GPU would end in, or has ended
            in; None where no single one is known.
        hazard: The same as a record.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        module_path: str | None = None,
        source: SourceLine | None = None,
        kind: HazardKind = HazardKind.STATE,
        cuda_error: int | None = None,
    ) -> None:
        details = []
        if op is not None:
            details.append(f"  op:     {op}")
        if module_path is not None:
            details.append(f"  module: {module_path or '(root module)'}")
        if source is not None:
            details.append(f"  source: {source}")
        if cuda_error is not None:
            details.append(f"  cuda:   error {cuda_error} in a capture on a GPU")
        super().__init__("\n".join([message, *details]))
        self._message = message
        self.hazard = Hazard(kind, *split_remedy(message), op, module_path, source, cuda_error)
        self.op = op
        self.module_path = module_path
        self.source = source
        self.kind = kind
        self.cuda_error = cuda_error

    def located(self, module_path: str | None, source: SourceLine | None) -> "CaptureError":
        """Return this error with a place, where it has none yet."""
        if self.module_path is not None or self.source is not None:
            return self
        return CaptureError(
            self._message,
            op=self.op,
            module_path=module_path,
            source=source,
            kind=self.kind,
            cuda_error=self.cuda_error,
        )


Refuse = Callable[[CaptureError], None]


def raised(error: CaptureError) -> None:
    """Refuse as a capture does; a check has a list instead."""
    raise error


def first_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    try:
        lines = str(error).strip().splitlines()
    except Exception as failure:  # of an exception of somebody else's
        lines = [f"no message, whose making fails by {type(failure).__name__}"]
    return f"{type(error).__name__}: {(lines or ['no message'])[0]}"


def split_remedy(message: str) -> tuple[str, str]:
    """Return what a message says is wrong, and what it says is to be done."""
    for word in ("Remedy: ", "Ways out: "):
        why, found, fix = message.partition(word)
        if found:
            return why.rstrip(" ."), fix
    return message.rstrip("."), ""
