"""The FusedAdam of Transformer Engine and of apex, captured as their versions allow."""

import importlib.metadata
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.base.dtensors import is_dtensor, local_part
from graphfsdp.config import MixedPrecisionPolicy
from graphfsdp.errors import PrecisionError
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.optim.adapters.precision import (
    APEX,
    TE,
    OptimizerFacts,
    Situation,
    Version,
    find_row,
)

_PACKAGES: Mapping[str, str] = MappingProxyType({"transformer_engine": TE, "apex": APEX})


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
                # The table says more than yes or no.
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
            situation = Situation(
                self._name,
                version,
                param.dtype,
                self.main_grad_dtype(param, policy),
                self._main_dtype(param),
                moments,
                remainders=bool(getattr(made, "store_param_remainders", False)),
                capturable=bool(getattr(made, "capturable", False)),
                dtensor=is_dtensor(param),
                empty_shard=not local_part(param).numel(),
                gathered_in_8_bits=policy.gather_format is not None,
            )
            row = find_row(situation)
            if not row.captured:
                shown = ".".join(map(str, version)) or "of unknown version"
                raise PrecisionError(
                    f"{self._name} {shown} cannot be captured with {row.case.value}, as {name!r} "
                    f"(parameter {situation.param}, gradient {situation.grad}): {row.why}. "
                    f"Remedy: {row.remedy}"
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
