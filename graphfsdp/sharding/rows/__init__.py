"""Tensors whose rows are cut unevenly: what they are, and what operators do with them.

Imports graphfsdp.base and the placement of sharding.
"""
