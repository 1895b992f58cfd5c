"""Capturable optimizers: FusedAdam, and adapters that make other optimizers capturable."""

if __name__ != "graphfsdp.optim":
    raise ImportError(
        f"this folder is the package graphfsdp.optim, but was imported as {__name__!r}; "
        "write `from graphfsdp.optim import FusedAdam`"
    )

from graphfsdp.optim.fused.adam import FusedAdam as FusedAdam
from graphfsdp.optim.muon import Muon as Muon

__all__ = [
    "FusedAdam",
    "Muon",
]
