"""The host side of an optimizer: which tensors, groups and numbers it held."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from graphfsdp._capture.trace.source import assignment_of, definition_of
from graphfsdp.base.hazards import HazardKind
from graphfsdp.errors import CaptureError


class HostOptimizer:
    """What an optimizer held before an iteration, to compare with and to put back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {param: dict(state) for param, state in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._numbers = _numbers(vars(optimizer))

    def changes(self) -> Iterator[CaptureError]:
        """Yield a refusal of each thing that an iteration made or counted on the host."""
        for param, state in self._optimizer.state.items():
            before_state = self._state.get(param, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and before_state.get(key) is not value:
                    yield CaptureError(
                        f"the optimizer made new state {key!r} for a parameter of shape "
                        f"{tuple(param.shape)} while the iteration was recorded; each replay "
                        "would start it anew. Remedy: more warm-up steps, so that every "
                        "parameter has been stepped once before the capture",
                        kind=HazardKind.OPTIMIZER,
                        source=definition_of(type(self._optimizer).step),
                    )
            where = f"its state of a parameter of shape {tuple(param.shape)}"
            yield from self._changed_numbers(_numbers(before_state), _numbers(state), where)
        for index, (before_group, group) in enumerate(
            zip(self._groups, self._optimizer.param_groups, strict=False)
        ):
            yield from self._changed_settings(index, _numbers(before_group), _numbers(group))
        now = _numbers(vars(self._optimizer))
        yield from self._changed_numbers(self._numbers, now, "its attributes")

    def restore(self) -> None:
        optimizer = self._optimizer
        for param in list(optimizer.state):
            if param not in self._state:
                del optimizer.state[param]
            else:
                optimizer.state[param].clear()
                optimizer.state[param].update(self._state[param])
        vars(optimizer).update(self._numbers)
        del optimizer.param_groups[len(self._groups) :]
        for group, before_group in zip(optimizer.param_groups, self._groups, strict=False):
            group.clear()
            group.update(before_group)

    def _changed_settings(
        self, index: int, before: Mapping[str, float], after: Mapping[str, float]
    ) -> Iterator[CaptureError]:
        for key, value in after.items():
            if key in before and before[key] != value:
                yield CaptureError(
                    f"the iteration changed {key!r} of group {index} of "
                    f"{type(self._optimizer).__name__} from {before[key]} to {value}; a replay "
                    "runs no Python and would leave it so. Remedy: change it after the captured "
                    "step, outside the iteration, which replays see",
                    kind=HazardKind.BAKED_NUMBER,
                    source=None,
                )

    def _changed_numbers(
        self, before: Mapping[str, float], after: Mapping[str, float], where: str
    ) -> Iterator[CaptureError]:
        for key, value in after.items():
            if before.get(key) != value:
                yield CaptureError(
                    f"{type(self._optimizer).__name__} changed the number {key!r} among {where} "
                    f"from {before.get(key)} to {value}; a replay runs no Python and would go on "
                    "with this one. Remedy: scope='forward_backward', which leaves the optimizer "
                    "outside the graph; graphfsdp.optim.FusedAdam; or counting in a tensor",
                    kind=HazardKind.OPTIMIZER,
                    source=assignment_of(self._optimizer, key)
                    or definition_of(type(self._optimizer).step),
                )


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
