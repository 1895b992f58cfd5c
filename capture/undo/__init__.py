"""A failed warm-up or capture leaves no trace.

Imports trace, rules, guards and ranks.
"""
