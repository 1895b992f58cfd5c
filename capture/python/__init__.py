"""Python that an iteration moves, and that stands still in a replay: found, and tried further on.

Imports trace and rules.
"""
