"""The package safetensors, in whose files checkpoints lie, looked for when one is written or read.

A machine without it trains, and says at the first checkpoint what is missing.
"""

import importlib
from typing import Any

from graphfsdp.errors import CheckpointError


def safetensors(module: str = "safetensors") -> Any:
    """Return the package, or a module of it.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "checkpoints are files of safetensors, and that package is not installed. Remedy: "
            "pip install safetensors"
        ) from error
