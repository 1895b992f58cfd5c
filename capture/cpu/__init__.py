"""The CPU backend: record an iteration, make a straight-line program of it, replay it.

Imports trace, rules, guards, ranks, undo and report.
"""
