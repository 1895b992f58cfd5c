"""Which optimizer can be captured with which precision, as data: the guard's table.

``table_rows`` and ``rich_table`` are what ``graphfsdp check --precision-table`` prints.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rich.table import Table

Version = tuple[int, ...]
_NARROW = (torch.bfloat16, torch.float16)


class Case(Enum):
    """What a row is about; its value is what a reader sees."""

    NOT_CAPTURABLE = "made without capturable=True (CUDA), or fused=True"
    GRAD_UNLIKE_PARAM = "a gradient's dtype is not its parameter's"
    EMPTY_SHARD = "a rank owns no element of a parameter"
    DTENSOR = "parameters are DTensors"
    MAIN_NOT_FP32 = "main weights that are not float32"
    BF16_MAIN = "bfloat16 parameters with main weights"
    NARROW_PLAIN = "bfloat16 or float16 parameters without main weights"
    BF16_MOMENTS = "bfloat16 moments"
    MOMENTS = "moments that are not both float32 or both bfloat16"
    REMAINDERS = "store_param_remainders=True"
    REST = "everything else"


@dataclass(frozen=True)
class Situation:
    """One parameter, and how its optimizer was made.

    Attributes:
        optimizer: A name that rows have.
        version: Of its package; empty where that does not matter.
        param: Dtype of the parameter.
        grad: Dtype of the gradient that the optimizer reads.
        main: Dtype of its main weight, None where there is none.
        moments: Dtypes of its moments.
        remainders: Main weights are kept as remainders.
        capturable: It was made so that it may be captured.
        dtensor: The parameter is a DTensor.
        empty_shard: This rank owns no element of it.
    """

    optimizer: str
    version: Version = ()
    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    main: torch.dtype | None = None
    moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    remainders: bool = False
    capturable: bool = True
    dtensor: bool = False
    empty_shard: bool = False

    def is_case(self, case: Case) -> bool:
        """Return whether a row of this case speaks of the situation."""
        same = {self.moments} & {(dtype, dtype) for dtype in (torch.float32, torch.bfloat16)}
        return {
            Case.NOT_CAPTURABLE: not self.capturable,
            Case.GRAD_UNLIKE_PARAM: self.grad != self.param,
            Case.EMPTY_SHARD: self.empty_shard,
            Case.DTENSOR: self.dtensor,
            Case.MAIN_NOT_FP32: self.main not in (None, torch.float32),
            Case.BF16_MAIN: self.main is not None and self.param == torch.bfloat16,
            Case.NARROW_PLAIN: self.main is None and self.param in _NARROW,
            Case.BF16_MOMENTS: self.moments == (torch.bfloat16, torch.bfloat16),
            Case.MOMENTS: not same,
            Case.REMAINDERS: self.remainders,
            Case.REST: True,
        }[case]


@dataclass(frozen=True)
class PrecisionRow:
    """A row: the first one that fits a situation decides.

    Attributes:
        optimizer: Name of the optimizer.
        case: What the row is about.
        captured: Whether it can be captured then.
        why: The reason, where it cannot.
        remedy: The way out, where it cannot.
        before: The first version of the package that the row does not hold for; empty: all.
    """

    optimizer: str
    case: Case
    captured: bool
    why: str = ""
    remedy: str = ""
    before: Version = ()

    @property
    def versions(self) -> str:
        """The versions that the row holds for, in words."""
        return f"before {'.'.join(map(str, self.before))}" if self.before else "any"

    def fits(self, situation: Situation) -> bool:
        """Return whether the row speaks of a situation."""
        return (
            self.optimizer == situation.optimizer
            and (not self.before or situation.version < self.before)
            and situation.is_case(self.case)
        )


NATIVE = ("FusedAdam", "FusedSGD", "FusedLion", "Muon", "Adafactor")
OFFLOAD = "CPUOffload of any of these"
TORCH = "torch Adam, AdamW"
TORCH_SGD = "torch SGD, fused"
OTHER = "another torch.optim.Optimizer"
TE = "Transformer Engine FusedAdam"
APEX = "apex FusedAdam"
_OURS = "graphfsdp.optim.FusedAdam"
_EQUAL = "equal main_params_dtype and main_grads_dtype"


def _refused(optimizer: str, case: Case, why: str, remedy: str, *before: int) -> PrecisionRow:
    return PrecisionRow(optimizer, case, False, why, remedy, before)


TABLE: tuple[PrecisionRow, ...] = (
    *(PrecisionRow(name, Case.REST, True) for name in NATIVE),
    _refused(
        OFFLOAD,
        Case.REST,
        "the host waits for the gradients and steps on the CPU, and a replay runs nothing there",
        "scope='forward_backward', which leaves the optimizer outside the graph; or the optimizer "
        "itself, with bfloat16 or float8 moments or remainders where memory is short",
    ),
    _refused(
        TORCH,
        Case.NOT_CAPTURABLE,
        "it counts its steps on the host, which a replay would freeze",
        f"fused=True, and on CUDA capturable=True; or {_OURS}",
    ),
    _refused(
        TORCH,
        Case.GRAD_UNLIKE_PARAM,
        "its kernels take one dtype for parameter and gradient",
        f"{_EQUAL}, or {_OURS}",
    ),
    PrecisionRow(TORCH, Case.REST, True),
    _refused(
        TORCH_SGD,
        Case.DTENSOR,
        "torch has no rule for its fused kernel on DTensors",
        "graphfsdp.optim.FusedSGD; or fused=False, with an lr that does not change",
    ),
    _refused(
        TORCH_SGD,
        Case.GRAD_UNLIKE_PARAM,
        "its kernels take one dtype for parameter and gradient",
        f"{_EQUAL}, or graphfsdp.optim.FusedSGD",
    ),
    PrecisionRow(TORCH_SGD, Case.REST, True),
    _refused(
        OTHER,
        Case.GRAD_UNLIKE_PARAM,
        "optimizers of torch take one dtype for parameter and gradient",
        f"{_EQUAL}, or {_OURS}",
    ),
    PrecisionRow(OTHER, Case.REST, True),
    _refused(
        TE,
        Case.NOT_CAPTURABLE,
        "it keeps lr and the step count on the host, which a replay would freeze",
        "capturable=True",
    ),
    _refused(
        TE,
        Case.EMPTY_SHARD,
        "before 2.18 tensors without elements make it skip updates or read beyond its tables",
        "Transformer Engine 2.18, or " + _OURS,
        *(2, 18),
    ),
    _refused(
        TE,
        Case.DTENSOR,
        "before 2.14 its kernels and states know no DTensors",
        "Transformer Engine 2.14, or " + _OURS,
        *(2, 14),
    ),
    _refused(
        TE,
        Case.GRAD_UNLIKE_PARAM,
        "its capturable kernels before 2.20 need gradients of the parameter's dtype",
        f"{_EQUAL}; Transformer Engine 2.20; or {_OURS}(use_decoupled_grad=True)",
        *(2, 20),
    ),
    _refused(
        TE,
        Case.REMAINDERS,
        "its capturable kernels know no remainders",
        f"store_param_remainders=False, or {_OURS}",
    ),
    _refused(
        TE,
        Case.MAIN_NOT_FP32,
        "other main weights go through temporary copies, whose addresses change",
        "master_weight_dtype=torch.float32",
    ),
    _refused(
        TE,
        Case.BF16_MOMENTS,
        "before 2.13 its capturable kernels know float32 moments alone",
        f"float32 moments; Transformer Engine 2.13; or {_OURS}",
        *(2, 13),
    ),
    _refused(
        TE,
        Case.MOMENTS,
        "other moments go through temporary copies, whose addresses change",
        f"both float32 or both bfloat16, or {_OURS}",
    ),
    PrecisionRow(TE, Case.REST, True),
    _refused(
        APEX,
        Case.NOT_CAPTURABLE,
        "it keeps lr and the step count on the host, which a replay would freeze",
        "capturable=True",
    ),
    _refused(
        APEX,
        Case.DTENSOR,
        "it knows no DTensors and no tensors without elements",
        _OURS,
    ),
    _refused(
        APEX,
        Case.EMPTY_SHARD,
        "tensors without elements make it read beyond its tables",
        _OURS,
    ),
    _refused(
        APEX,
        Case.GRAD_UNLIKE_PARAM,
        "it reads the parameter in the gradient's dtype, without a check: memory is corrupted",
        f"{_EQUAL}, or {_OURS}",
    ),
    _refused(
        APEX,
        Case.BF16_MAIN,
        "it allocates main weights for bfloat16 parameters and never updates them",
        f"float16 parameters, or {_OURS}(master_weights=True)",
    ),
    _refused(
        APEX,
        Case.NARROW_PLAIN,
        "it rounds the moments of narrow parameters to their dtype in every step",
        f"float32 parameters, or {_OURS}",
    ),
    PrecisionRow(APEX, Case.REST, True),
)


def find_row(situation: Situation) -> PrecisionRow:
    """Return the row that decides.

    Raises:
        LookupError: no row has that optimizer.
    """
    for row in TABLE:
        if row.fits(situation):
            return row
    raise LookupError(f"no row of the precision table is about {situation.optimizer!r}")


def table_rows() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield optimizer, versions, case, whether it is captured, and why not with the way out."""
    for row in TABLE:
        reason = f"{row.why}. Remedy: {row.remedy}" if row.why else ""
        verdict = "captured" if row.captured else "refused"
        yield row.optimizer, row.versions, row.case.value, verdict, reason


def rich_table() -> "Table":
    """Return the table for a rich console."""
    from rich.table import Table

    table = Table(title="What the precision guard accepts; the first row that fits decides")
    for heading in ("optimizer", "versions", "when", "", "why not, and what to do"):
        table.add_column(heading, overflow="fold")  # else rich cuts long words off
    for cells in table_rows():
        table.add_row(*cells)
    return table
