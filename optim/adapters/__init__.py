"""Any optimizer as the CapturableOptimizer that a capture asks for.

Imports graphfsdp.base, fused and whole.
"""
