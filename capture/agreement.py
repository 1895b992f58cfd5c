"""Ranks that share a model capture together or not at all."""

from collections.abc import Sequence

import torch.distributed as dist

from graphfsdp.errors import CaptureError


class Agreement:
    """One exchange between ranks about one capture.

    A rank that captured while another did not would wait for ever in the first collective of its
    replay. So each rank tells the others how its attempt ended, and all of them keep the graph or
    none does.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Prepare.

        Args:
            groups: The ranks that share the model; none if it lies on one rank only.
        """
        self._groups = [group for group in groups if group.size() > 1]
        self._settled = not self._groups

    @property
    def is_collective(self) -> bool:
        """Whether other ranks take part."""
        return bool(self._groups)

    def settle(self, failure: CaptureError | None) -> None:
        """Tell the other ranks how this one fared; only the first call does anything.

        Raises:
            CaptureError: this rank succeeded, but another did not; the message names it.
        """
        if self._settled:
            return
        self._settled = True
        for group in self._groups:
            messages: list[str | None] = [None] * group.size()
            dist.all_gather_object(messages, None if failure is None else str(failure), group)
            failed = {rank: text for rank, text in enumerate(messages) if text is not None}
            if failed and failure is None:
                rank, text = next(iter(failed.items()))
                raise CaptureError(
                    f"rank {rank} of {group.size()} could not capture, so no rank did; "
                    f"everything is as it was before. Rank {rank} said: {text}"
                )


__all__ = ["Agreement"]
