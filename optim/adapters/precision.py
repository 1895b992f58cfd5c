"""The precision guard, and which optimizer can be captured with which precision, as data.

The optimizer must read the persistent gradient buffer, never a copy. ``rich_table`` is what
``graphfsdp check --precision-table`` prints.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import local_part
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import PrecisionError

if TYPE_CHECKING:
    from rich.table import Table

Version = tuple[int, ...]
_NARROW = (torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NUM_NAMED = 3


class Case(Enum):
    QUANTISED_PARAM = "parameters that are 8-bit numbers themselves"
    NOT_CAPTURABLE = "made without capturable=True"
    GRAD_UNLIKE_PARAM = "a gradient's dtype is not its parameter's"
    EMPTY_SHARD = "a rank owns no element of a parameter"
    DTENSOR = "parameters are DTensors"
    MAIN_NOT_FP32 = "main weights that are not float32"
    BF16_MAIN = "bfloat16 parameters with main weights"
    NARROW_PLAIN = "bfloat16 or float16 parameters without main weights"
    BF16_MOMENTS = "bfloat16 moments"
    MOMENTS = "moments that are not both float32 or both bfloat16"
    REMAINDERS = "store_param_remainders=True"
    GATHERED_IN_8_BITS = "weights that gather_format quantises"
    REST = "everything else"


@dataclass(frozen=True)
class Situation:
    optimizer: str  # a name that rows have
    version: Version = ()  # of its package; empty where that does not matter
    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32  # of the gradient that the optimizer reads
    main: torch.dtype | None = None  # of its main weight, None where there is none
    moments: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    remainders: bool = False  # main weights are kept as remainders
    capturable: bool = True  # it was made so that it may be captured
    dtensor: bool = False
    empty_shard: bool = False  # this rank owns no element of the parameter
    quantised: bool = False  # the parameter itself, by its class or its dtype
    gathered_in_8_bits: bool = False  # from the parameter, which is the main weight

    def is_case(self, case: Case) -> bool:
        same = {self.moments} & {(dtype, dtype) for dtype in (torch.float32, torch.bfloat16)}
        return {
            Case.QUANTISED_PARAM: self.quantised,
            Case.GATHERED_IN_8_BITS: self.gathered_in_8_bits,
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
    """A row: the first one that fits a situation decides."""

    optimizer: str
    case: Case
    captured: bool
    why: str = ""  # it cannot be captured
    remedy: str = ""
    before: Version = ()  # the first version that the row does not hold for; empty: all

    def fits(self, situation: Situation) -> bool:
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
_ONE_DTYPE = "its kernels take one dtype for parameter and gradient"
_ON_HOST = "it keeps lr and the step count on the host, which a replay would freeze"


_ROUNDED_AWAY = (
    "a step is smaller than the distance of 8-bit numbers, so there must be a main weight",
    "parameters in float32 or bfloat16, which convert_linears and gather_format quantise",
)


def _rows(optimizer: str, *refused: tuple[Case, str, str, Version]) -> Iterator[PrecisionRow]:
    """Yield a row for each case that is refused, with why, remedy and ``before``, and the rest."""
    yield PrecisionRow(optimizer, Case.QUANTISED_PARAM, False, *_ROUNDED_AWAY)
    for case, why, remedy, before in refused:
        yield PrecisionRow(optimizer, case, False, why, remedy, before)
    if all(case is not Case.REST for case, *_ in refused):
        yield PrecisionRow(optimizer, Case.GATHERED_IN_8_BITS, True)
        yield PrecisionRow(optimizer, Case.REST, True)


TABLE: tuple[PrecisionRow, ...] = (
    *(row for name in NATIVE for row in _rows(name)),
    *_rows(
        OFFLOAD,
        (
            Case.REST,
            "the host waits for the gradients and steps on the CPU, and a replay runs nothing "
            "there",
            "scope='forward_backward', which leaves the optimizer outside the graph; or the "
            "optimizer itself, with bfloat16 or float8 moments or remainders where memory is short",
            (),
        ),
    ),
    *_rows(
        TORCH,
        (Case.GRAD_UNLIKE_PARAM, _ONE_DTYPE, f"{_EQUAL}, or {_OURS}", ()),
    ),
    *_rows(
        TORCH_SGD,
        (
            Case.DTENSOR,
            "torch has no rule for its fused kernel on DTensors",
            "graphfsdp.optim.FusedSGD; or fused=False, with an lr that does not change",
            (),
        ),
        (Case.GRAD_UNLIKE_PARAM, _ONE_DTYPE, f"{_EQUAL}, or graphfsdp.optim.FusedSGD", ()),
    ),
    *_rows(
        OTHER,
        (
            Case.GRAD_UNLIKE_PARAM,
            "optimizers of torch take one dtype for parameter and gradient",
            f"{_EQUAL}, or {_OURS}",
            (),
        ),
    ),
    *_rows(
        TE,
        (Case.NOT_CAPTURABLE, _ON_HOST, "capturable=True", ()),
        (
            Case.EMPTY_SHARD,
            "before 2.18 tensors without elements make it skip updates or read beyond its tables",
            f"Transformer Engine 2.18, or {_OURS}",
            (2, 18),
        ),
        (
            Case.DTENSOR,
            "before 2.14 its kernels and states know no DTensors",
            f"Transformer Engine 2.14, or {_OURS}",
            (2, 14),
        ),
        (
            Case.GRAD_UNLIKE_PARAM,
            "its capturable kernels before 2.20 need gradients of the parameter's dtype",
            f"{_EQUAL}; Transformer Engine 2.20; or {_OURS}(use_decoupled_grad=True)",
            (2, 20),
        ),
        (
            Case.REMAINDERS,
            "its capturable kernels know no remainders",
            f"store_param_remainders=False, or {_OURS}",
            (),
        ),
        (
            Case.MAIN_NOT_FP32,
            "other main weights go through temporary copies, whose addresses change",
            "master_weight_dtype=torch.float32",
            (),
        ),
        (
            Case.BF16_MOMENTS,
            "before 2.13 its capturable kernels know float32 moments alone",
            f"float32 moments; Transformer Engine 2.13; or {_OURS}",
            (2, 13),
        ),
        (
            Case.MOMENTS,
            "other moments go through temporary copies, whose addresses change",
            f"both float32 or both bfloat16, or {_OURS}",
            (),
        ),
    ),
    *_rows(
        APEX,
        (Case.NOT_CAPTURABLE, _ON_HOST, "capturable=True", ()),
        (Case.DTENSOR, "it knows no DTensors and no tensors without elements", _OURS, ()),
        (Case.EMPTY_SHARD, "tensors without elements make it read beyond its tables", _OURS, ()),
        (
            Case.GRAD_UNLIKE_PARAM,
            "it reads the parameter in the gradient's dtype, without a check: memory is corrupted",
            f"{_EQUAL}, or {_OURS}",
            (),
        ),
        (
            Case.BF16_MAIN,
            "it allocates main weights for bfloat16 parameters and never updates them",
            f"float16 parameters, or {_OURS}(master_weights=True)",
            (),
        ),
        (
            Case.NARROW_PLAIN,
            "it rounds the moments of narrow parameters to their dtype in every step",
            f"float32 parameters, or {_OURS}",
            (),
        ),
    ),
)


def find_row(situation: Situation) -> PrecisionRow:
    for row in TABLE:
        if row.fits(situation):
            return row
    raise LookupError(f"no row of the precision table is about {situation.optimizer!r}")


def rich_table() -> "Table":
    from rich.table import Table

    table = Table(title="What the precision guard accepts; the first row that fits decides")
    for heading in ("optimizer", "versions", "when", "", "why not, and what to do"):
        table.add_column(heading, overflow="fold")  # else rich cuts long words off
    for row in TABLE:
        versions = f"before {'.'.join(map(str, row.before))}" if row.before else "any"
        verdict = (
            ("captured", "") if row.captured else ("refused", f"{row.why}. Remedy: {row.remedy}")
        )
        table.add_row(row.optimizer, versions, row.case.value, *verdict)
    return table


def _own_dtype(param: Tensor) -> torch.dtype:
    return param.dtype


def is_quantised(param: Tensor) -> bool:
    """Whether 8-bit numbers are all there is of it, also where its class hides their dtype."""
    local = local_part(param)
    # Transformer Engine's parameters have their quantiser with them.
    return local.dtype in _FLOAT8 or hasattr(local, "_quantizer")


@dataclass(frozen=True)
class OptimizerFacts:
    name: str  # its class, for messages
    use_decoupled_grad: bool = False
    main_weight_dtype: Callable[[Tensor], torch.dtype] = _own_dtype  # of the weight it updates
    mixed_gradients: bool = False  # it can step on a gradient whose dtype is not the parameter's
    keeps_main_weights: bool = False  # it can be told to keep main weights of its own


def main_param_dtype(
    param: Tensor, policy: MixedPrecisionPolicy, facts: OptimizerFacts
) -> torch.dtype:
    """Return the dtype of the main weight: the policy's, or that of the updated weight."""
    return policy.main_params_dtype or facts.main_weight_dtype(param)


def main_grad_dtype(
    param: Tensor, policy: MixedPrecisionPolicy, facts: OptimizerFacts
) -> torch.dtype:
    """Return the dtype of the persistent gradient: the policy's, or the main weight's."""
    return policy.main_grads_dtype or main_param_dtype(param, policy, facts)


def check_precision(
    named_params: Mapping[str, nn.Parameter],
    policy: MixedPrecisionPolicy,
    facts: OptimizerFacts,
) -> None:
    """Refuse settings with which the optimizer would read a casted copy of a gradient.

    A cast makes a new tensor: it is no view of the persistent buffer, costs a pass over memory in
    each iteration, and is what a graph would go on reading while the buffer gets new values.
    """
    if policy.use_decoupled_grad != facts.use_decoupled_grad:
        raise PrecisionError(_decoupling_message(policy, facts))
    quantised = [name for name, p in named_params.items() if p.requires_grad and is_quantised(p)]
    if quantised:
        why, remedy = _ROUNDED_AWAY
        raise PrecisionError(
            f"{facts.name} cannot step on {Case.QUANTISED_PARAM.value}, as "
            f"{_list_names(quantised)}: {why}. Remedy: {remedy}"
        )
    main = partial(main_param_dtype, policy=policy, facts=facts)
    grad = partial(main_grad_dtype, policy=policy, facts=facts)
    compared: tuple[tuple[_DtypeOf, _DtypeOf, Callable[[_Clash], str]], ...] = (
        (facts.main_weight_dtype, main, _Clash.of_main_weights),
        (main, grad, _Clash.of_a_casted_copy),
        (_own_dtype, grad, _Clash.of_one_dtype),
    )
    if facts.use_decoupled_grad:
        compared = compared[:1]
    elif facts.mixed_gradients:
        compared = compared[:2]
    for left, right, message in compared:
        pairs = {name: (left(param), right(param)) for name, param in named_params.items()}
        names = [name for name, (one, other) in pairs.items() if one != other]
        if names:
            one, other = pairs[names[0]]
            clash = _Clash(_short(one), _short(other), _list_names(names), policy, facts)
            raise PrecisionError(message(clash))


_DtypeOf = Callable[[Tensor], torch.dtype]


def _decoupling_message(policy: MixedPrecisionPolicy, facts: OptimizerFacts) -> str:
    read = "param.decoupled_grad" if facts.use_decoupled_grad else "param.grad"
    if policy.use_decoupled_grad:
        ways = (
            f"construct FusedAdam(..., use_decoupled_grad=True) in place of {facts.name}, or drop "
            "use_decoupled_grad from the policy"
        )
    else:
        ways = (
            "set MixedPrecisionPolicy(use_decoupled_grad=True), or construct the optimizer "
            "without use_decoupled_grad"
        )
    return (
        f"mp_policy.use_decoupled_grad is {policy.use_decoupled_grad}, but {facts.name} reads "
        f"{read}: the gradients would be bound where the optimizer does not look. Ways out: {ways}"
    )


class _Clash(NamedTuple):
    """Two dtypes that must be equal and are not, and the parameters where it is so."""

    left: str
    right: str
    names: str
    policy: MixedPrecisionPolicy
    facts: OptimizerFacts

    def of_main_weights(self) -> str:
        ways = ["drop main_params_dtype from the policy", f"make the parameters {self.right}"]
        if self.facts.keeps_main_weights and self.right == "float32":
            ways.insert(0, "construct FusedAdam(..., master_weights=True)")
        return (
            f"mp_policy.main_params_dtype is {self.right}, but {self.facts.name} updates weights "
            f"in {self.left}, for {self.names}. Ways out: {_numbered(ways)}"
        )

    def of_a_casted_copy(self) -> str:
        ways = [
            "read the gradient apart from the parameter: FusedAdam(..., use_decoupled_grad=True) "
            "with MixedPrecisionPolicy(use_decoupled_grad=True, ...)",
            f"equal dtypes: main_grads_dtype={self.left}, or main_params_dtype={self.right} "
            "with main weights of that dtype",
            "drop main_grads_dtype: the main grads then have the dtype of the main weights",
        ]
        origin = "mp_policy.main_params_dtype"
        if self.policy.main_params_dtype is None:
            origin = f"main_params_dtype (not set: what {self.facts.name} updates)"
        return (
            f"{origin} is {self.left} and mp_policy.main_grads_dtype is {self.right}, so the "
            f"optimizer would read a casted copy of the gradient, not the persistent buffer, for "
            f"{self.names}. Ways out: {_numbered(ways)}"
        )

    def of_one_dtype(self) -> str:
        ways = [
            "use graphfsdp.optim.FusedAdam, which takes any float dtypes",
            f"main_grads_dtype={self.left}",
            "drop the dtypes from the policy",
        ]
        return (
            f"the main grads are {self.right} (mp_policy.main_grads_dtype is "
            f"{_short(self.policy.main_grads_dtype)}, main_params_dtype is "
            f"{_short(self.policy.main_params_dtype)}), but {self.facts.name} needs gradients of "
            f"the parameter's dtype, {self.left}, for {self.names}. Ways out: {_numbered(ways)}"
        )


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _list_names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NUM_NAMED])
    rest = len(names) - _NUM_NAMED
    return shown if rest <= 0 else f"{shown} and {rest} more"


def _numbered(ways: list[str]) -> str:
    return "; ".join(f"({number}) {way}" for number, way in enumerate(ways, start=1))
