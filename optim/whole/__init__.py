"""Muon, which needs whole matrices.

Imports graphfsdp.base and fused.
"""
