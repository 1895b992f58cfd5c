"""Checkpoints: save on any ranks, load on any others, into a live graph (docs/checkpoints.md).

Beside its own modules it imports base, sharding and optim; trainers and the command line use it.
"""

from graphfsdp.checkpoint.loading import Loaded as Loaded
from graphfsdp.checkpoint.loading import load as load
from graphfsdp.checkpoint.saving import AsyncSaver as AsyncSaver
from graphfsdp.checkpoint.saving import save as save
