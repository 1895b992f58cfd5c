"""Optimizers that need whole tensors: Muon and Adafactor.

Imports graphfsdp.base and fused.
"""
