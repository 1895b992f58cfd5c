"""How far the losses of two runs are apart.

Shapes: K = steps.
"""

import math

from torch import Tensor

from graphfsdp.bench.records import ParityRecord

NUM_EARLY_STEPS = 10


def compare_losses(
    reference: Tensor,  # [K] float32
    own: Tensor,  # [K] float32
) -> ParityRecord:
    """Compare the losses of all steps."""
    apart = (reference.double() - own.double()).abs()
    differs = ~((reference == own) | (reference.isnan() & own.isnan()))
    places = differs.nonzero().flatten().tolist()
    largest, early, last = apart.max().item(), apart[:NUM_EARLY_STEPS].max().item(), own[-1].item()
    return ParityRecord(
        num_steps=len(own),
        max_difference=largest if math.isfinite(largest) else None,
        bit_exact=not places,
        first_difference=places[0] if places else None,
        early_difference=early if math.isfinite(early) else None,
        last_loss=last if math.isfinite(last) else None,
    )
