"""FusedAdam, FusedSGD, FusedLion: plan, step, kernel and state.

Imports graphfsdp.base alone.
"""
