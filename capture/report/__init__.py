"""The facts of a captured step as text, JSON and an HTML page; describes programs.

Imports trace, rules, guards and ranks.
"""
