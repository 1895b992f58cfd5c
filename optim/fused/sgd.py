"""FusedSGD: SGD with momentum on flat runs, always capturable.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.errors import ConfigError
from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.grad_scaler import DeviceGradScaler
from graphfsdp.optim.fused.step_settings import Flags, StepSettings, moment_dtype


class FusedSGD(DeviceOptimizer):
    """SGD with all that changes kept on the device: lr, momentum, dampening, weight decay.

    State per parameter: ``step`` [] float32; ``momentum_buffer`` [...] unless every group is made
    with a momentum of zero; and with main weights ``master_param`` [...], see ``FusedAdam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        store_param_remainders: bool = False,
        skip_nonfinite: bool = False,
        max_grad_norm: float | None = None,
        norm_type: float = 2.0,
        grad_scaler: DeviceGradScaler | None = None,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Learning rate; a tensor must be on the parameters' device.
            momentum: Share of the old momentum in the new one.
            dampening: Share of a gradient, after the first, that is left out of the momentum.
            weight_decay: Times the weight, this is added to the gradient.
            nesterov: Look ahead along the momentum.
            maximize: Climb instead of descending.
            momentum_dtype: Dtype in which the momentum is stored, see ``FusedAdam``.
            use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``.
            master_weights: Keep float32 main weights for bfloat16 and float16 parameters.
            store_param_remainders: Keep the main weight of a bfloat16 parameter as the 16 bits
                that the parameter lacks, in int16.
            skip_nonfinite: Leave everything as it is where a gradient, or the norm of all of them
                in float32, is not finite.
            max_grad_norm: Clip the gradients' global norm, inside the update.
            norm_type: 2 or infinity.
            grad_scaler: Unscales the gradients; implies ``skip_nonfinite``.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or a parameter cannot be trained.
        """
        if not isinstance(params, Iterable):
            raise ConfigError(f"params must be an iterable, got {type(params).__name__}")
        listed: list[Any] = list(params)
        momenta = [
            group.get("momentum", momentum) if isinstance(group, dict) else momentum
            for group in listed
        ]
        settings = StepSettings(
            Flags(False, False, maximize, rule="sgd", nesterov=nesterov),
            use_decoupled_grad,
            master_weights,
            store_param_remainders,
            skip_nonfinite or grad_scaler is not None,
            max_grad_norm,
            norm_type,
            moment_dtype(momentum_dtype),
            has_moments=any(momenta),
        )
        if nesterov and (dampening or not all(momenta)):
            raise ConfigError(
                "nesterov=True needs a momentum and no dampening, got "
                f"momentum={momentum}, dampening={dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        }
        super().__init__(listed, defaults, settings, grad_scaler)
