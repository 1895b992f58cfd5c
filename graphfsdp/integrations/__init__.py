"""Loops of other libraries whose iterations are captured: Hugging Face's Trainer, Lightning.

Programs on top: each module may import every package, and its own library.
"""

import importlib
from typing import Any

from graphfsdp.errors import ConfigError


def import_library(*names: str, install: str) -> Any:
    """Return the first module of these that can be imported.

    Raises:
        ConfigError: none is installed.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # One that is installed and lacks something itself says best what that is.
            if error.name is None or error.name.partition(".")[0] != name.partition(".")[0]:
                raise
    raise ConfigError(
        f"this integration needs {' or '.join(names)}, which is not installed. Remedy: {install}"
    )
