"""Memory and values for models that were built on the meta device.

Imports graphfsdp.base and the rest of graphfsdp.sharding.
"""
