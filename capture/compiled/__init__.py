"""A recording as C++: stretches of its nodes as FX graphs, compiled by Inductor.

Imports trace.
"""
