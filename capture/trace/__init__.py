"""What one iteration did: operators, values, storages, source lines, Python constants.

The lowest room of capture: it imports graphfsdp.base alone.
"""
