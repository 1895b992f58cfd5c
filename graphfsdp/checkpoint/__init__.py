"""Checkpoints: save on any ranks, load on any others, into a live graph (docs/checkpoints.md)."""

from graphfsdp.checkpoint.async_saving import AsyncSaver as AsyncSaver
from graphfsdp.checkpoint.full import full_state_dict as full_state_dict
from graphfsdp.checkpoint.full import load_full_state_dict as load_full_state_dict
from graphfsdp.checkpoint.fused import FusedWeight as FusedWeight
from graphfsdp.checkpoint.fused import fused_qkv as fused_qkv
from graphfsdp.checkpoint.fused import gated_delta_net as gated_delta_net
from graphfsdp.checkpoint.fused import gated_delta_net_conv as gated_delta_net_conv
from graphfsdp.checkpoint.fused import swiglu as swiglu
from graphfsdp.checkpoint.loading import Loaded as Loaded
from graphfsdp.checkpoint.loading import load as load
from graphfsdp.checkpoint.saving import save as save
