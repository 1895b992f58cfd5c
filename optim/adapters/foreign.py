"""The FusedAdam of Transformer Engine, captured as its newest versions allow."""

import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from graphfsdp.errors import PrecisionError
from graphfsdp.optim.adapters.baked import BakedAdapter
from graphfsdp.optim.adapters.precision import OptimizerFacts

Version = tuple[int, ...]
TE = "Transformer Engine FusedAdam"
# Before it parameters without elements, DTensors, gradients of another dtype and bfloat16 moments
# go wrong inside a graph, each until another version.
_OLDEST = (2, 20)
_FP32, _BF16 = torch.float32, torch.bfloat16
_OURS = "graphfsdp.optim.FusedAdam"


def is_transformer_engines(optimizer: torch.optim.Optimizer) -> bool:
    cls = type(optimizer)
    return cls.__name__ == "FusedAdam" and cls.__module__.startswith("transformer_engine.")


def installed_version(package: str) -> Version:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


class TransformerEngineAdapter(BakedAdapter):
    """Its lr is a tensor that stays live; other numbers are baked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(
            optimizer,
            OptimizerFacts(
                name=TE,
                use_decoupled_grad=bool(getattr(optimizer, "use_decoupled_grad", False)),
                main_weight_dtype=lambda param: self._main_dtype(param) or param.dtype,
                keeps_main_weights=True,
            ),
        )

    def _check_inside_graph(self, named_params: Mapping[str, nn.Parameter]) -> None:
        super()._check_inside_graph(named_params)
        version = installed_version("transformer_engine")
        for name, param in named_params.items():
            for what, why, remedy in self._refusals(param, version):
                shown = ".".join(map(str, version)) or "of unknown version"
                raise PrecisionError(
                    f"{self._name} {shown} cannot be captured with {what}, as for {name!r}: {why}. "
                    f"Remedy: {remedy}"
                )

    def _refusals(self, param: Tensor, version: Version) -> Iterator[tuple[str, str, str]]:
        """Yield what it cannot do inside a graph, why, and the remedy."""
        made: Any = self.optimizer
        if not getattr(made, "capturable", False):
            why = "it keeps lr and the step count on the host, which a replay would freeze"
            yield "what was made without capturable=True", why, "capturable=True"
        if version < _OLDEST:
            why = "its capturable kernels before 2.20 cannot do all that is asked of them here"
            yield "any setting", why, f"Transformer Engine 2.20, or {_OURS}"
        if getattr(made, "store_param_remainders", False):
            why = "its capturable kernels know no remainders"
            yield "store_param_remainders=True", why, "store_param_remainders=False"
        if self._main_dtype(param) not in (None, _FP32):
            why = "other main weights go through temporary copies, whose addresses change"
            yield "main weights that are not float32", why, "master_weight_dtype=torch.float32"
        moments = {getattr(made, f"{key}_dtype", _FP32) for key in ("exp_avg", "exp_avg_sq")}
        if moments not in ({_FP32}, {_BF16}):
            why = "other moments go through temporary copies, whose addresses change"
            remedy = f"both float32 or both bfloat16, or {_OURS}"
            yield "moments that are not both float32 or both bfloat16", why, remedy

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
    """What it asks a torch GradScaler for: whether to skip, and what to divide by."""

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
