"""Mixture of experts whose shapes do not depend on the data, so that a graph can hold it.

Imports nothing of graphfsdp but its base.
"""

from graphfsdp.moe.layer import Experts as Experts
from graphfsdp.moe.layer import MoE as MoE
from graphfsdp.moe.layer import Router as Router
from graphfsdp.moe.layer import overflowed_tokens as overflowed_tokens

__all__ = ["Experts", "MoE", "Router", "overflowed_tokens"]
