"""The facts of a captured step as text, JSON, HTML and a Perfetto trace.

Imports trace, rules and ranks.
"""
