"""fully_shard: units, their flat buffers, and the schedule that gathers and reduces them.

Imports graphfsdp.base; never capture or optim.
"""
