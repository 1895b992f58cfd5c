"""The FusedAdam of Transformer Engine and of apex, captured as their versions allow."""

import importlib.metadata
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import PrecisionError
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.optim.adapters.precision import OptimizerFacts

Version = tuple[int, ...]
TE = "Transformer Engine FusedAdam"
APEX = "apex FusedAdam"
_PACKAGES: Mapping[str, str] = MappingProxyType({"transformer_engine": TE, "apex": APEX})
_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_OURS = "graphfsdp.optim.FusedAdam"
_EQUAL = "equal main_params_dtype and main_grads_dtype"


class Facts(NamedTuple):
    """What decides whether one of them can step on a parameter inside a graph."""

    param: torch.dtype = _FP32
    grad: torch.dtype = _FP32  # of the gradient that it reads
    main: torch.dtype | None = None  # of its main weight, None where there is none
    moments: tuple[torch.dtype, torch.dtype] = (_FP32, _FP32)
    remainders: bool = False  # main weights are kept as remainders
    capturable: bool = True  # it was made so that it may be captured
    dtensor: bool = False
    empty_shard: bool = False  # this rank owns no element of the parameter


class Refusal(NamedTuple):
    what: str
    holds: Callable[[Facts], bool]
    why: str
    remedy: str
    before: Version = ()  # the first version that it does not hold for; empty: all


_ON_HOST = Refusal(
    "made without capturable=True",
    lambda facts: not facts.capturable,
    "it keeps lr and the step count on the host, which a replay would freeze",
    "capturable=True",
)
_EMPTY_SHARD = "a rank owns no element of a parameter"
_DTENSOR = "parameters are DTensors"
_GRAD_UNLIKE_PARAM = "a gradient's dtype is not its parameter's"
# Of each the first that holds is told.
REFUSALS: Mapping[str, tuple[Refusal, ...]] = MappingProxyType(
    {
        TE: (
            _ON_HOST,
            Refusal(
                _EMPTY_SHARD,
                lambda facts: facts.empty_shard,
                "before 2.18 tensors without elements make it skip updates or read beyond its "
                "tables",
                f"Transformer Engine 2.18, or {_OURS}",
                (2, 18),
            ),
            Refusal(
                _DTENSOR,
                lambda facts: facts.dtensor,
                "before 2.14 its kernels and states know no DTensors",
                f"Transformer Engine 2.14, or {_OURS}",
                (2, 14),
            ),
            Refusal(
                _GRAD_UNLIKE_PARAM,
                lambda facts: facts.grad != facts.param,
                "its capturable kernels before 2.20 need gradients of the parameter's dtype",
                f"{_EQUAL}; Transformer Engine 2.20; or {_OURS}(use_decoupled_grad=True)",
                (2, 20),
            ),
            Refusal(
                "store_param_remainders=True",
                lambda facts: facts.remainders,
                "its capturable kernels know no remainders",
                f"store_param_remainders=False, or {_OURS}",
            ),
            Refusal(
                "main weights that are not float32",
                lambda facts: facts.main not in (None, _FP32),
                "other main weights go through temporary copies, whose addresses change",
                "master_weight_dtype=torch.float32",
            ),
            Refusal(
                "bfloat16 moments",
                lambda facts: facts.moments == (_BF16, _BF16),
                "before 2.13 its capturable kernels know float32 moments alone",
                f"float32 moments; Transformer Engine 2.13; or {_OURS}",
                (2, 13),
            ),
            Refusal(
                "moments that are not both float32 or both bfloat16",
                lambda facts: facts.moments not in ((_FP32, _FP32), (_BF16, _BF16)),
                "other moments go through temporary copies, whose addresses change",
                f"both float32 or both bfloat16, or {_OURS}",
            ),
        ),
        APEX: (
            _ON_HOST,
            Refusal(
                _DTENSOR,
                lambda facts: facts.dtensor,
                "it knows no DTensors and no tensors without elements",
                _OURS,
            ),
            Refusal(
                _EMPTY_SHARD,
                lambda facts: facts.empty_shard,
                "tensors without elements make it read beyond its tables",
                _OURS,
            ),
            Refusal(
                _GRAD_UNLIKE_PARAM,
                lambda facts: facts.grad != facts.param,
                "it reads the parameter in the gradient's dtype, without a check: memory is "
                "corrupted",
                f"{_EQUAL}, or {_OURS}",
            ),
            Refusal(
                "bfloat16 parameters with main weights",
                lambda facts: facts.main is not None and facts.param == _BF16,
                "it allocates main weights for bfloat16 parameters and never updates them",
                f"float16 parameters, or {_OURS}(master_weights=True)",
            ),
            Refusal(
                "bfloat16 or float16 parameters without main weights",
                lambda facts: facts.main is None and facts.param in (_BF16, _FP16),
                "it rounds the moments of narrow parameters to their dtype in every step",
                f"float32 parameters, or {_OURS}",
            ),
        ),
    }
)


def find_refusal(name: str, version: Version, facts: Facts) -> Refusal | None:
    for refusal in REFUSALS[name]:
        if (not refusal.before or version < refusal.before) and refusal.holds(facts):
            return refusal
    return None


def foreign_name(optimizer: torch.optim.Optimizer) -> str | None:
    cls = type(optimizer)
    return _PACKAGES.get(cls.__module__.split(".")[0]) if cls.__name__ == "FusedAdam" else None


def installed_version(package: str) -> Version:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


class ForeignAdamAdapter(BakedAdapter):
    """A FusedAdam that is not ours; lr is a tensor that stays live, other numbers are baked."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        super().__init__(
            optimizer,
            OptimizerFacts(
                name=name,
                use_decoupled_grad=bool(getattr(optimizer, "use_decoupled_grad", False)),
                main_weight_dtype=lambda param: self._main_dtype(param) or param.dtype,
                # The refusals say more than yes or no.
                mixed_gradients=True,
                keeps_main_weights=True,
            ),
        )

    def _check_inside_graph(
        self, named_params: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy
    ) -> None:
        super()._check_inside_graph(named_params, policy)
        version = installed_version(type(self.optimizer).__module__.split(".")[0])
        made: Any = self.optimizer
        moments = (
            getattr(made, "exp_avg_dtype", torch.float32),
            getattr(made, "exp_avg_sq_dtype", torch.float32),
        )
        for name, param in named_params.items():
            facts = Facts(
                param.dtype,
                self.main_grad_dtype(param, policy),
                self._main_dtype(param),
                moments,
                remainders=bool(getattr(made, "store_param_remainders", False)),
                capturable=bool(getattr(made, "capturable", False)),
                dtensor=is_dtensor(param),
                empty_shard=not local_part(param).numel(),
            )
            refusal = find_refusal(self._name, version, facts)
            if refusal is not None:
                shown = ".".join(map(str, version)) or "of unknown version"
                raise PrecisionError(
                    f"{self._name} {shown} cannot be captured with {refusal.what}, as {name!r} "
                    f"(parameter {facts.param}, gradient {facts.grad}): {refusal.why}. "
                    f"Remedy: {refusal.remedy}"
                )

    def step(self, grad_scale: Tensor | None, found_inf: Tensor | None = None) -> None:
        """Scale and skip in the optimizer's own kernels. Capture: as capturable as these are."""
        made: Any = self.optimizer
        if not getattr(made, "capturable", False):
            super().step(grad_scale, found_inf)
            return
        if found_inf is not None and self._skipped is not None:
            self._skipped.add_(found_inf)
        if grad_scale is None and found_inf is None:
            made.step()
        else:
            made.step(grad_scaler=_Steering(self.optimizer, grad_scale, found_inf))

    def _main_dtype(self, param: Tensor) -> torch.dtype | None:
        made: Any = self.optimizer
        if not getattr(made, "master_weights", False) or param.dtype == torch.float32:
            return None
        dtype: torch.dtype = getattr(made, "master_weight_dtype", torch.float32)
        return dtype


class _Steering:
    """What these optimizers ask a torch GradScaler for: whether to skip, and what to divide by."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        grad_scale: Tensor | None,  # [] float32, multiplies every gradient
        found_inf: Tensor | None,  # [] float32
    ) -> None:
        self._devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        self._grad_scale = grad_scale
        self._found_inf = found_inf

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Return [] float32 for each device, 1 where the step is to be skipped."""
        if self._found_inf is None:
            return {device: torch.zeros((), device=device) for device in self._devices}
        flag = (self._found_inf != 0).float()
        return {device: flag.to(device) for device in self._devices}

    def _get_scale_async(self) -> Tensor:
        """Return [] float64, the reciprocal of what gradients are to be multiplied by."""
        if self._grad_scale is None:
            device = next(iter(self._devices))
            return torch.ones((), dtype=torch.float64, device=device)
        return self._grad_scale.double().reciprocal()
