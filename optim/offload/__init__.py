"""Optimizer state in the CPU's memory.

Imports graphfsdp.base and fused.
"""
