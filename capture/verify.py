"""Replays beside eager runs from the same state, compared bit for bit, or by a bound."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from graphfsdp._capture.compiled.bounds import (
    allowances,
    beyond,
    is_rounded,
    is_weight,
    largest,
    wide,
)
from graphfsdp._capture.engine import Engine
from graphfsdp._capture.ranks.ranks import Ranks
from graphfsdp._capture.recording import Recording
from graphfsdp._capture.trace.values import as_bytes
from graphfsdp._capture.undo.host_state import Attempt, generators_of
from graphfsdp.base.dtensors import local_part
from graphfsdp.errors import VerificationError

_REMEDY = (
    "Remedy: make the iteration depend on tensors alone: what loss_fn takes from Python (a global, "
    "a closure, a counter) is baked into the graph. If it does, this is a bug of graphfsdp: please "
    "report it with this message. Everything is as it was before this call"
)
_STATE = "optimizer state"
_LOG = logging.getLogger("graphfsdp")
_NUM_MORE_RUNS = 2  # eager ones, on a GPU
_TIMES = 16.0  # what eager runs differ by
_UNORDERED = (
    "not deterministic in eager mode either: runs from the same state differ in %s. "
    "What differs is judged by how far eager runs are apart, weights and optimizer state are left "
    "out. Remedy: torch.use_deterministic_algorithms(True), with CUBLAS_WORKSPACE_CONFIG=:4096:8 "
    "in the environment, for as long as you verify"
)


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in two runs.

    Attributes:
        max_difference: Largest absolute difference; NaN where only one side is NaN, or absent.
    """

    name: str
    num_unequal: int
    numel: int
    max_difference: float

    def __str__(self) -> str:
        size = "a NaN" if math.isnan(self.max_difference) else f"up to {self.max_difference:.3g}"
        return f"{self.name} differs in {self.num_unequal} of {self.numel} elements, by {size}"


class Verifier:
    """Proves that a replay does what the same Python does eagerly.

    Note [Verification]: an eager iteration runs first and is undone, then the replay runs from
    the very same state. Everything that both leave is compared, in the order in which an
    iteration computes it, and where anything differs everything is put back.

    Note [Kernels without an order]: on a GPU many kernels add by atomics (attention's backward
    pass, ``index_add``, ``scatter_add``), so that an iteration differs from itself in last bits.
    There the eager iteration runs several times. What differs between them is named, once, and
    judged by how far apart eager runs are; weights and what an optimizer keeps are left out then,
    since Adam makes a whole step of a gradient that is nothing but rounding.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks
        self._has_named = False  # what is not deterministic

    def replay(self, recording: Recording) -> list[Tensor]:
        """Replay the batch in the static inputs, after an eager run that is undone.

        A VerificationError leaves everything as it was before.
        """
        graph = recording.graph
        assert graph is not None
        attempt = self._attempt(recording)
        bound = graph.facts.bound
        state = _state_of(self._engine, ()) if bound else {}
        before = {name: each for name, each in state.items() if is_weight(name)}
        try:
            expected = self._run_eagerly(recording)
            allowed: dict[str, float] = {}
            if bound:  # compiled replays have one of their own
                allowed = allowances(expected, before, bound)
            elif self._engine.backend.name == "cuda":
                allowed = self._allowed_by_noise(expected, recording)
            with attempt.watching():
                results = graph.replay()
            difference = first_difference(expected, _state_of(self._engine, results), allowed)
            if difference is not None:
                raise VerificationError(
                    "a replay is not what the same iteration does eagerly: "
                    f"{difference}. {_REMEDY}",
                    tensor=difference.name,
                    max_difference=difference.max_difference,
                )
            self._ranks.settle()
            return results
        except BaseException:  # also Ctrl-C: nothing may stay half done
            attempt.roll_back()
            raise

    def _allowed_by_noise(
        self, expected: Mapping[str, Tensor], recording: Recording
    ) -> dict[str, float]:
        noise = _Noise(expected)
        for _ in range(_NUM_MORE_RUNS):
            noise.add(self._run_eagerly(recording))
        if noise.gaps and not self._has_named:
            self._has_named = True
            _LOG.warning(_UNORDERED, ", ".join(list(noise.gaps)[:4]))
        return noise.allowed()

    def undone(self, recording: Recording) -> AbstractContextManager[None]:
        """Run replays of the last batch in the body, and put everything back."""
        return self._attempt(recording).undone()

    def _attempt(self, recording: Recording) -> Attempt:
        """Return what also puts back what replays write beside the model: an average of weights."""
        graph = recording.graph
        return self._engine.attempt(beside=map(as_bytes, graph.facts.written if graph else ()))

    def _run_eagerly(self, recording: Recording) -> dict[str, Tensor]:
        with self._attempt(recording).undone(), self._engine.backend.on_capture_stream():
            return _state_of(self._engine, self._engine.iterate(recording.inputs)[0])


class _Noise:
    """How far eager runs from the same state are apart.

    A loss is one number: a few runs may round it alike by luck, while the gradients behind it
    differ. So whatever is equal in all runs may still differ by as much, measured by its largest
    element, as that which was seen to differ.

    Attributes:
        gaps: The largest difference so far, by tensor; those that are equal are not in it.
    """

    def __init__(self, expected: Mapping[str, Tensor]) -> None:
        self._expected = expected
        self.gaps: dict[str, float] = {}

    def add(self, other: Mapping[str, Tensor]) -> None:
        for name, one in self._expected.items():
            difference = first_difference({name: one}, {name: other[name]})
            if difference is not None:
                self.gaps[name] = max(self.gaps.get(name, 0.0), difference.max_difference)

    def allowed(self) -> dict[str, float]:
        """Return by how much tensors of a replay may differ."""
        if not self.gaps:
            return {}
        rounded = {name: each for name, each in self._expected.items() if is_rounded(each)}
        # An optimizer makes a step of full size of a gradient that is noise alone.
        steps = {name for name in self._expected if is_weight(name) or name.startswith(_STATE)}
        sizes = {name: largest(each) for name, each in rounded.items() if name not in steps}
        ratios = (self.gaps[name] / sizes[name] for name in self.gaps if sizes.get(name))
        ratio = max(ratios, default=0.0)
        allowed = {name: _TIMES * gap for name, gap in self.gaps.items()}
        for name, size in sizes.items():
            least = _TIMES * size * max(ratio, torch.finfo(rounded[name].dtype).eps)
            allowed[name] = max(allowed.get(name, 0.0), least)
        return {**allowed, **dict.fromkeys(steps, math.inf)}


def _state_of(engine: Engine, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return copies of results, gradients, buffers, optimizer state, parameters and generators.

    In the order in which an iteration computes them, so that the first that differs is the one
    nearest to the cause.
    """
    named = [(f"result {index}", result) for index, result in enumerate(results)]
    named += engine.named_state()
    for index, generator in enumerate(generators_of(engine.model, engine.backend.device)):
        state = generator.get_state()
        named.append((f"the state of generator {index} on {generator.device}", state))
    found = [(name, local_part(tensor).detach()) for name, tensor in named]
    # On the host: a GPU may have no room for up to three copies beside the iteration.
    return {name: tensor.cpu() if tensor.is_cuda else tensor.clone() for name, tensor in found}


def first_difference(
    left: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    allowed: Mapping[str, float] = MappingProxyType({}),
) -> Difference | None:
    """Return the first tensor that differs, or is on one side only; NaN is equal to NaN.

    ``allowed``: by how much some may.
    """
    for name in (*left, *(name for name in right if name not in left)):
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            numel = (one if one is not None else right[name]).numel()
            return Difference(name, numel, numel, math.nan)
        unequal = beyond(one, other, allowed[name]) if name in allowed else _unequal(one, other)
        if unequal.any():
            gap = (wide(one)[unequal] - wide(other)[unequal]).abs().max()
            return Difference(name, int(unequal.sum()), one.numel(), float(gap))
    return None


def _unequal(left: Tensor, right: Tensor) -> Tensor:
    bits = [t.contiguous().reshape(*t.shape, 1).view(torch.uint8) for t in (left, right)]
    unequal = (bits[0] != bits[1]).any(dim=-1)
    if is_rounded(left):
        unequal &= ~(wide(left).isnan() & wide(right).isnan())
    return unequal
