"""What may not change after a capture.

Imports trace.
"""
