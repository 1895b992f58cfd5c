"""FusedAdam: plan, step, kernel and state.

Imports graphfsdp.base alone.
"""
