"""Weights as numbers in 8 bits with scales beside them, which ``gather_format`` sends.

Imports nothing of graphfsdp but its base.
"""
