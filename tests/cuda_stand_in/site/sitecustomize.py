"""Python's start above the stand-in: kernels compute, in child processes too.

Torch is not imported here, since many processes never need it: its import is watched.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _torch() -> None:
    from cuda_stand_in import compute

    compute.install()


def _optimizers() -> None:
    from cuda_stand_in import compute

    compute.install_op("graphfsdp::fused_adam_")


def _casts() -> None:
    from cuda_stand_in import compute

    for name in ("find_amax_", "pack_"):
        compute.install_op(f"graphfsdp::{name}")


class _After(MetaPathFinder):
    """Calls a function when a module has been imported."""

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._calls.pop(name, None)  # also so that the search below passes this finder
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        self._calls[name] = call  # whoever only asks for it does not import it
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            self._calls.pop(name, None)
            execute(module)
            call()

        loader.exec_module = execute_and_call
        return spec


if "CUDA_STAND_IN" in os.environ and os.environ.get("CUDA_STAND_IN_KERNELS") != "none":
    calls = {
        "torch": _torch,
        "graphfsdp.optim.fused.step": _optimizers,
        "graphfsdp.eight_bit.cast": _casts,
    }
    sys.meta_path.insert(0, _After(calls))
