"""Weights that are gathered ahead of their use.

Shapes: B = elements of a whole buffer; S = elements of one rank's shard.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from graphfsdp.collectives import Transfer, all_gather_
from graphfsdp.streams import Lane


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
    moment: tuple[int, bool]

    @classmethod
    def begin(
        cls,
        main: Tensor,  # [S] main weights
        source: Tensor,  # [S] the same in the compute dtype
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
        return cls(full, transfer, _moment(main))

    def receive(self, main: Tensor) -> Tensor | None:
        """Wait for the weights; None if they are of no use any more.

        They are not if somebody has written main weights since (a hook that clips them, say), or
        if they were gathered inside torch.inference_mode and are used outside of it.

        Args:
            main: [S] main weights.

        Capture: a wait.
        """
        self.transfer.wait()
        return self.full if self.moment == _moment(main) else None


def _moment(main: Tensor) -> tuple[int, bool]:
    version = -1 if main.is_inference() else main._version
    return version, torch.is_inference_mode_enabled()


__all__ = ["Prefetched"]
