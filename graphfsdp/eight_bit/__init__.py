"""Numbers in 8 bits with scales beside them: values as such numbers, and products of them.

Imports nothing of graphfsdp but its base.
"""

from graphfsdp.eight_bit.delayed import DelayedScaling as DelayedScaling
from graphfsdp.eight_bit.linear import EightBitLinear as EightBitLinear
from graphfsdp.eight_bit.linear import convert_linears as convert_linears
