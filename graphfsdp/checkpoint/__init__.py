"""Checkpoints: save on any ranks, load on any others, into a live graph (docs/checkpoints.md).

Beside its own modules it imports base, sharding and optim; trainers and the command line use it.
"""

from graphfsdp.checkpoint.full import full_state_dict as full_state_dict
from graphfsdp.checkpoint.loading import Loaded as Loaded
from graphfsdp.checkpoint.loading import load as load
from graphfsdp.checkpoint.loading import load_full_state_dict as load_full_state_dict
from graphfsdp.checkpoint.saving import AsyncSaver as AsyncSaver
from graphfsdp.checkpoint.saving import save as save
