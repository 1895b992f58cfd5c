"""Ranks capture and replay together or not at all.

Imports trace.
"""
