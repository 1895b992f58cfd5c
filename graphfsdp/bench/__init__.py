"""The benchmark behind ``graphfsdp bench``: workloads, contenders, measurements, results.

A program on top of the public API, which may import everything; nothing but the command line
imports it.
"""
