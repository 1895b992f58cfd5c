"""What a capture may not do, and how it is seen.

Imports trace and graphfsdp.base.
"""
