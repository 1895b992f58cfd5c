"""What steers a step on the device: gradient norm, clipping, the skip flag.

Shapes: [...] a parameter's shape; [] is a 0-D tensor.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphfsdp.base.norms import HeldByGroups, clip_coefficient, global_norm


class StepControl:
    """Device scalars around the fused operation; none of them is read on the host.

    ``skipped_steps`` ([] float32) keeps its address after the first step. ``grad_norm`` ([]
    float32) is of the unscaled gradients in the last step that needed it.
    """

    def __init__(self, skip_nonfinite: bool = False, max_grad_norm: float | None = None) -> None:
        """Make the scalars on the CPU; ``place`` moves them."""
        self._skip_nonfinite = skip_nonfinite
        self._max_grad_norm = max_grad_norm
        self.skipped_steps = torch.zeros((), device="cpu")
        self.grad_norm = torch.zeros((), device="cpu")

    def place(self, device: torch.device | None) -> None:
        """Move to where the first parameters are. Capture: never inside, copies from the host."""
        if device is not None and self.skipped_steps.device != device:
            self.skipped_steps = self.skipped_steps.to(device)
            self.grad_norm = self.grad_norm.to(device)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "number of skipped steps", self.skipped_steps
        yield "gradient norm", self.grad_norm

    def restart(self) -> None:
        """Forget the steps that were taken, in place."""
        self.skipped_steps.zero_()
        self.grad_norm.zero_()

    def needs_norm(self, found_inf: Tensor | None) -> bool:
        checks = self._skip_nonfinite and found_inf is None
        return checks or self._max_grad_norm is not None

    def prepare(
        self,
        parts: HeldByGroups | None,  # the gradients, where needs_norm says so
        grad_scale: Tensor | None,  # [] float
        found_inf: Tensor | None,  # [] float
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what multiplies every gradient, and whether to skip, of this step.

        Capture: no host sync; one collective for each group of ranks that shares gradients.
        """
        if parts is None:
            return grad_scale, found_inf
        norm = global_norm(*parts, self.grad_norm.device)
        if found_inf is None and self._skip_nonfinite:
            found_inf = norm.isfinite().logical_not_().to(torch.float32)
        if grad_scale is not None:
            norm = norm * grad_scale
        self.grad_norm.copy_(norm)
        if self._max_grad_norm is not None:
            coefficient = clip_coefficient(norm, self._max_grad_norm)
            grad_scale = coefficient if grad_scale is None else grad_scale * coefficient
        return grad_scale, found_inf

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy into what exists, so that a captured step goes on."""
        self.skipped_steps.copy_(state_dict["skipped_steps"])
