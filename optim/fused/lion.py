"""FusedLion: Lion on flat runs, always capturable.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from graphfsdp.optim.fused.device_optimizer import DeviceOptimizer
from graphfsdp.optim.fused.grad_scaler import DeviceGradScaler
from graphfsdp.optim.fused.step_settings import Flags, StepSettings, moment_dtype


class FusedLion(DeviceOptimizer):
    """Lion with all that changes kept on the device: lr, decay, betas.

    State per parameter: ``step`` [] float32, ``exp_avg`` [...], and with main weights
    ``master_param`` [...]; see ``FusedAdam``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
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
            betas: Share of the old momentum in the direction of a step, and in the new momentum,
                each in [0, 1).
            weight_decay: Fraction of the weight removed per unit of learning rate.
            maximize: Climb instead of descending.
            exp_avg_dtype: Dtype in which the momentum is stored, see ``FusedAdam``.
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
        settings = StepSettings(
            Flags(True, False, maximize, rule="lion"),
            use_decoupled_grad,
            master_weights,
            store_param_remainders,
            skip_nonfinite or grad_scaler is not None,
            max_grad_norm,
            norm_type,
            moment_dtype(exp_avg_dtype),
        )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, settings, grad_scaler)
