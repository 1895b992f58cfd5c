"""The name under which ``graphfsdp.plots`` was first published."""

from graphfsdp.plots import draw_layout as draw_layout
from graphfsdp.plots import draw_lifetimes as draw_lifetimes
