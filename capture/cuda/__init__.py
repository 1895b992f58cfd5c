"""The CUDA backend: record an iteration into a CUDA graph, explain what the driver refuses.

Imports trace, rules, guards, ranks, undo and report.
"""
