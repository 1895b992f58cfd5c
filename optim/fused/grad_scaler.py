"""Gradient scaling for float16 with all of its state on the device."""

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError


class DeviceGradScaler:
    """A loss scale that grows and backs off without a host read.

    Give it to ``FusedAdam(..., grad_scaler=scaler)`` and multiply the loss by ``scale``, e.g.
    through ``scale_loss`` in ``loss_fn``: the step then unscales the gradients inside its kernel,
    is skipped where a gradient is not finite, and updates the scale, all in the captured iteration.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        """Set up the scale.

        Args:
            init_scale: The first scale, positive.
            growth_factor: Multiplies the scale after ``growth_interval`` finite steps in a row.
            backoff_factor: Multiplies the scale after each step that was skipped.
            growth_interval: See there; at least one.
            device: Where the parameters are.

        Raises:
            ConfigError: a number is out of its range.
        """
        for name, value, fits, expected in (
            ("init_scale", init_scale, 0 < init_scale < float("inf"), "a positive number"),
            ("growth_factor", growth_factor, growth_factor > 1, "more than 1"),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", growth_interval, growth_interval >= 1, "at least 1"),
        ):
            if not fits:
                raise ConfigError(f"{name} must be {expected}, got {value!r}")
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self._num_finite = torch.zeros((), dtype=torch.int32, device=device)

    @property
    def scale(self) -> Tensor:
        """[] float32, what the loss is multiplied by; its address stays."""
        return self._scale

    @property
    def num_finite(self) -> Tensor:
        """[] int32, finite steps since the scale changed; its address stays."""
        return self._num_finite

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale, in float32.

        Capture: no host sync.
        """
        return loss.float() * self._scale

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Let the scale grow or back off.

        Args:
            found_inf: [] float32, not zero if the step was skipped.

        Capture: one operation, no host sync.
        """
        torch._amp_update_scale_(
            self._scale,
            self._num_finite,
            found_inf,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of ``scale`` and ``num_finite``."""
        return {"scale": self._scale.clone(), "num_finite": self._num_finite.clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Copy saved values into the tensors that exist, so that a captured step goes on."""
        self._scale.copy_(state_dict["scale"])
        self._num_finite.copy_(state_dict["num_finite"])
