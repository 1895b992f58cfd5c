"""Weights that are gathered ahead of their use.

Shapes: B = elements of a whole buffer; S = elements of one rank's shard.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from graphfsdp.base.collectives import Transfer, all_gather_
from graphfsdp.base.streams import Lane
from graphfsdp.sharding.weight_writes import Moment


@dataclass(frozen=True)
class Prefetched:
    """An all-gather that is under way.

    Attributes:
        full: [B] where the weights arrive.
        transfer: What is to be waited for.
        moment: What must not have changed when the weights are used.
    """

    full: Tensor
    transfer: Transfer
    moment: Moment

    @classmethod
    def begin(
        cls,
        moment: Moment,
        source: Tensor,  # [S] main weights in the compute dtype
        full: Tensor,  # [B] written
        group: dist.ProcessGroup,
        lane: Lane,
    ) -> "Prefetched":
        """Begin to gather.

        Capture: an all-gather without its wait.
        """
        transfer = Transfer(full, source)
        with lane.begun():
            all_gather_(full, source, group, transfer)
        return cls(full, transfer, moment)

    def receive(self, moment: Moment) -> Tensor | None:
        """Wait for the weights; None if they are of no use any more.

        They are not if somebody has written main weights since (a hook that clips them, say), or
        if they were gathered inside torch.inference_mode and are used outside of it.

        Args:
            moment: When they are used.

        Capture: a wait.
        """
        self.transfer.wait()
        return self.full if self.moment == moment else None
