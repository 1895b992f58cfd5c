"""Numbers in 8 bits with scales beside them: how values become such numbers, and back.

Imports nothing of graphfsdp but its base.
"""
