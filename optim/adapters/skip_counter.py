"""The number of skipped steps of an optimizer that does not count them itself."""

import torch
from torch import Tensor

# Of the optimizer, so that the number outlives a captured step and is found by a checkpoint.
_ATTRIBUTE = "_graphfsdp_skipped_steps"


def skip_counter(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Return [] float32, the steps that were skipped so far; None where nobody counts."""
    found: Tensor | None = vars(optimizer).get(_ATTRIBUTE)
    return found


def make_skip_counter(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return an optimizer's counter; made, as zero, if need be.

    Returns:
        [] float32, on the device of the first parameter.
    """
    found = skip_counter(optimizer)
    if found is None:
        device = optimizer.param_groups[0]["params"][0].device
        found = torch.zeros((), device=device)
        vars(optimizer)[_ATTRIBUTE] = found
    return found
