"""FusedAdam, FusedSGD and FusedLion: one pass over memory, always capturable.

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
from graphfsdp.optim.fused.settings import Flags, StepSettings, check_main_dtype


class FusedAdam(DeviceOptimizer):
    """Adam with all that changes kept on the device: steps, lr, decay, betas, eps.

    ``param_groups`` hold ordinary Python numbers (lr may be a tensor). They may be changed at any
    time, by hand or by a scheduler: ``step`` and every replay of a captured step read them anew.

    State per parameter: ``step`` [] float32, ``exp_avg`` and ``exp_avg_sq`` [...], with amsgrad
    ``max_exp_avg_sq`` [...], and with main weights ``master_param`` [...] float32, or int16 with
    remainders. State is made at the first step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = True,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        maximize: bool = False,
        skip_nonfinite: bool = False,
        max_grad_norm: float | None = None,
        grad_scaler: DeviceGradScaler | None = None,
    ) -> None:
        """Set up the optimizer.

        Args:
            params: Parameters, (name, parameter) pairs, or groups of either.
            lr: Learning rate; a tensor must be on the parameters' device.
            betas: Decay rates of the two moments, each in [0, 1).
            eps: Added to the root of the second moment, after bias correction.
            weight_decay: Fraction of the weight removed per unit of learning rate.
            amsgrad: Divide by the largest second moment so far.
            adam_w_mode: Decoupled weight decay (AdamW); otherwise decay joins the gradient.
            bias_correction: Correct the moments for their start at zero.
            capturable: Changes nothing: every FusedAdam is. It is here because constructor calls
                for torch and Transformer Engine have it.
            use_decoupled_grad: Read ``param.decoupled_grad`` instead of ``param.grad``, so that
                the gradient's dtype need not be the parameter's.
            master_weights: Keep float32 main weights for bfloat16 and float16 parameters.
            master_weight_dtype: torch.float32.
            exp_avg_dtype: Dtype in which the first moment is stored: float32 or bfloat16.
            exp_avg_sq_dtype: The same for the second moment.
            store_param_remainders: Keep the main weight of a bfloat16 parameter as the 16 bits
                that the parameter lacks, in int16: exact, and half of the memory.
            maximize: Climb instead of descending.
            skip_nonfinite: Leave everything as it is where a gradient, or the norm of all of them
                in float32, is not finite.
            max_grad_norm: Clip the gradients' global norm, inside the update.
            grad_scaler: Unscales the gradients; implies ``skip_nonfinite``.

        Raises:
            ConfigError: a hyper-parameter is out of its range, or a parameter cannot be trained.
        """
        check_main_dtype(master_weight_dtype)
        settings = StepSettings(
            Flags(adam_w_mode, bias_correction, maximize),
            use_decoupled_grad,
            master_weights,
            store_param_remainders,
            skip_nonfinite or grad_scaler is not None,
            max_grad_norm,
            exp_avg_dtype,
            exp_avg_sq_dtype,
            amsgrad,
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, settings, grad_scaler)


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
            use_decoupled_grad: See ``FusedAdam`` for this and all that follow.

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
            momentum_dtype,
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
            use_decoupled_grad: See ``FusedAdam`` for this and all that follow.

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
            exp_avg_dtype,
        )
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, settings, grad_scaler)
