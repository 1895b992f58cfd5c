"""graphfsdp.check: the pre-flight of a model or a script, its rehearsal and its report.

A program on top: it may import every package.
"""
