"""The facts of a captured step as text, JSON, HTML and a Perfetto trace; describes programs.

Imports trace, rules, guards and ranks.
"""
