"""Loops of other libraries whose iterations are captured: Hugging Face's Trainer, Lightning.

Programs on top: each module may import every package, and its own library.
"""

import importlib
from typing import Any

from graphfsdp.errors import ConfigError
from graphfsdp.in_place import capture_in_place
from graphfsdp.in_place.parts import Parts, PartsReport


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


class CapturesInParts:
    """What callbacks share that capture a training in parts, as it begins, and end that with it.

    Attributes:
        report: Of the parts, once the training is over; None before.
    """

    def __init__(self, **options: Any) -> None:
        """Take options of ``graphfsdp.capture_in_place``."""
        self._options = options
        self._loop: Parts | None = None
        self.report: PartsReport | None = None

    def _begin(self, modules: Any, optimizers: Any) -> None:
        """Take the place of the calls of modules and of the optimizers' steps."""
        self._loop = capture_in_place(modules, optimizers, **self._options)

    def _end(self) -> None:
        if self._loop is not None:
            self.report = self._loop.report()
            self._loop.close()
            self._loop = None
