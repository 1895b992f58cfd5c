"""graphfsdp.check: the pre-flight of a model or a script, and its report.

A program on top: it may import every package.
"""
