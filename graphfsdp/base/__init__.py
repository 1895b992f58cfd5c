"""What every other package may import: collectives, flat buffers, norms, DTensors, protocols.

Imports graphfsdp.errors, graphfsdp.config and torch.
"""
