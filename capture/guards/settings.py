"""Switches that decide what an iteration runs: torch's, and those of sharded units."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from graphfsdp._capture.guards.places import Place
from graphfsdp.base.changes import Change, ChangeKind
from graphfsdp.base.sharded import ShardedUnit

# What a pass reduces; when weights are dropped is nothing that a graph depends on.
_HEEDED = ("requires_gradient_sync", "is_last_microbatch", "requires_all_reduce")
_SETTINGS = operator.attrgetter(*_HEEDED)


def switches(device_type: str) -> Iterator[Place]:
    """Yield the switches of torch that an eager iteration would heed and a replay does not.

    Not guarded is what an iteration does not depend on: grad mode around the call (the iteration
    enables gradients by itself), anomaly detection, the number of threads, profilers.
    """
    for name, get in _switches(device_type).items():
        yield Place(name, (operator.call, get), get(), _changes)


def unit_settings(units: Sequence[ShardedUnit], before: Sequence[Any]) -> Iterator[Place]:
    """Yield what is said to sharded units, by ``set_requires_gradient_sync`` for one.

    What the iteration itself says is in the graph: ``before`` is how they were when the recording
    began; see ``settings_of``.
    """
    for unit, known in zip(units, before, strict=True):
        name = f"unit {unit.name or '(root)'!r}"
        yield Place(name, (_SETTINGS, unit), known, _unit_changes)


def settings_of(units: Iterable[ShardedUnit]) -> list[tuple[bool, ...]]:
    return list(map(_SETTINGS, units))


def _switches(device_type: str) -> dict[str, Callable[[], Any]]:
    """Return functions that read them; nearly each is one call into torch."""
    core = torch._C
    found: dict[str, Callable[[], Any]] = {
        f"autocast on {device_type}": partial(torch.is_autocast_enabled, device_type),
        f"autocast's dtype on {device_type}": lambda: (
            torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
        ),
        "the default dtype": torch.get_default_dtype,
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "torch.default_generator": partial(getattr, torch, "default_generator"),
        "flash attention": core._get_flash_sdp_enabled,
        "memory-efficient attention": core._get_mem_efficient_sdp_enabled,
        "math attention": core._get_math_sdp_enabled,
        "MKL-DNN": core._get_mkldnn_enabled,
    }
    backend = "cuda" if device_type == "cuda" else "mkldnn"
    for kind in ("matmul", "conv", "rnn"):
        # The older getters raise when a user has set the precision by the newer names.
        name = f"the float32 precision of {backend} {kind}"
        found[name] = partial(core._get_fp32_precision_getter, backend, kind)
    if device_type == "cuda":
        found |= {
            "cuDNN": core._get_cudnn_enabled,
            "torch.backends.cudnn.benchmark": core._get_cudnn_benchmark,
            "torch.backends.cudnn.deterministic": core._get_cudnn_deterministic,
            "cuDNN attention": core._get_cudnn_sdp_enabled,
            "reduced precision in bfloat16 matmul": (
                core._get_cublas_allow_bf16_reduced_precision_reduction
            ),
            "reduced precision in float16 matmul": (
                core._get_cublas_allow_fp16_reduced_precision_reduction
            ),
            "torch.cuda.default_generators": partial(getattr, torch.cuda, "default_generators"),
        }
    return found


def _plain(value: object) -> object:
    return "ieee" if value == "none" else value  # "none": nothing was ever set


def _changes(name: str, old: object, new: object) -> Iterator[Change]:
    if _plain(old) != _plain(new):
        remedy = f"set {name} before the capture and leave it so, or switch inside loss_fn"
        yield Change(ChangeKind.SETTING, name, *_words(old, new), remedy)


def _unit_changes(title: str, before: Sequence[bool], now: Sequence[bool]) -> Iterator[Change]:
    for name, old, new in zip(_HEEDED, before, now, strict=True):
        if old != new:
            remedy = f"set_{name} as it was, or within iteration="
            yield Change(ChangeKind.SETTING, f"{name} of {title}", *_words(old, new), remedy)


def _words(old: object, new: object) -> tuple[str, str]:
    if isinstance(old, bool) and isinstance(new, bool):
        return ("on" if old else "off", "on" if new else "off")
    return (str(_plain(old) or "off"), str(_plain(new) or "off"))
