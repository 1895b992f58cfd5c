"""``compile=True`` on a GPU: torch.compile makes the kernels that a graph then holds."""

from collections.abc import Iterable
from types import MappingProxyType

from torch import nn

from graphfsdp._capture.trace.source import has_compiled_regions

# Not Inductor's own graphs, since one graph is to hold all; and the generators' numbers of eager
# mode, which torch replays out of a captured graph as well.
_OPTIONS = MappingProxyType({"triton.cudagraphs": False, "fallback_random": True})


class CompiledRegions:
    """Models that are compiled in place while a captured step lives.

    The first warm-up compiles and autotunes, on the capture stream; the capture runs what there is
    by then. Modules that the user has compiled stay as they are, and so does what contains them.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = [model for model in models if not has_compiled_regions(model)]
        for model in self._models:
            model.compile(options=dict(_OPTIONS))

    def close(self) -> None:
        """Let the models run uncompiled again."""
        for model in self._models:
            vars(model).pop("_compiled_call_impl", None)
        self._models = []
