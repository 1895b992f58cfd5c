"""The trainer behind ``graphfsdp train``: model, data, loop, run directory, console."""
