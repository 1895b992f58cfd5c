"""The last metrics of a loop, kept on the device, so that the host reads once in many steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from graphfsdp.errors import ConfigError


class MetricRing:
    """A ring of the last k rows of scalars on the device.

    ``push`` may be called inside the captured iteration (in ``loss_fn``) or outside, once per
    step; ``read`` is the only host read, and is for outside::

        ring = graphfsdp.MetricRing(["loss", "grad_norm"], num_steps=100, device=device)
        for index, batch in enumerate(loader):
            ring.push(loss=step(*batch), grad_norm=step.grad_norm)
            if index % 100 == 99:
                for metrics in ring.read():  # 100 dicts of numbers, for one wait
                    log(metrics)
    """

    def __init__(
        self, names: Sequence[str], num_steps: int, *, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate the ring.

        Args:
            names: Of the metrics; each push gives all of them.
            num_steps: Rows that are kept.
            device: Where the metrics are.

        Raises:
            ConfigError: there is no name, a name comes twice, or no row would be kept.
        """
        self._names = tuple(names)
        if not self._names or len(set(self._names)) != len(self._names):
            raise ConfigError(f"a MetricRing needs names, each once; got {list(names)}")
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ConfigError(f"num_steps must be an integer of at least 1, got {num_steps!r}")
        self._num_steps = num_steps
        # One tensor, so that a read is one copy: the number of pushes, then the rows. float64
        # holds every float32 and every count exactly.
        self._buffer = torch.zeros(
            1 + num_steps * len(self._names), dtype=torch.float64, device=device
        )
        self._num_read = 0
        self._num_lost = 0

    @property
    def num_lost(self) -> int:
        """Rows that were overwritten before ``read`` saw them; as of the last read."""
        return self._num_lost

    @torch.no_grad()
    def push(self, **metrics: Tensor) -> None:
        """Append one row.

        Args:
            **metrics: Every metric by its name: tensors of one element on the ring's device.

        Raises:
            ConfigError: a metric is missing, unknown, no scalar tensor or on another device.

        Capture: no host sync; the ring's address stays.
        """
        self._check(metrics)
        row = torch.stack(
            [metrics[name].detach().reshape(()).to(torch.float64) for name in self._names]
        )
        count, rows = self._buffer[:1], self._buffer[1:].view(self._num_steps, -1)
        rows.index_copy_(0, count.remainder(self._num_steps).long(), row.unsqueeze(0))
        count.add_(1)

    def read(self) -> list[dict[str, float]]:
        """Return the rows pushed since the last read, oldest first, and forget them.

        Capture: one wait for the device; never inside the iteration.
        """
        count, *values = self._buffer.tolist()
        num_pushed = int(count)
        first = max(self._num_read, num_pushed - self._num_steps)
        self._num_lost += first - self._num_read
        self._num_read = num_pushed
        width = len(self._names)
        starts = (index % self._num_steps * width for index in range(first, num_pushed))
        return [
            dict(zip(self._names, values[start : start + width], strict=True)) for start in starts
        ]

    def _check(self, metrics: dict[str, Tensor]) -> None:
        if set(metrics) != set(self._names):
            raise ConfigError(
                f"this MetricRing keeps {', '.join(self._names)}; got {', '.join(metrics)}"
            )
        for name, value in metrics.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"metric {name!r} is a {type(value).__name__}; expected a tensor. Remedy: "
                    "push tensors as the step returns them"
                )
            if value.numel() != 1 or value.device != self._buffer.device:
                raise ConfigError(
                    f"metric {name!r} has shape {tuple(value.shape)} on {value.device}; expected "
                    f"one element on {self._buffer.device}"
                )
