"""Memory that operators of ours need while they run, as part of the program that calls them."""

from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp._capture.trace.op_tensors import scratch_places
from graphfsdp._capture.trace.storages import StorageInfo
from graphfsdp._capture.trace.values import Node, Value


def add_scratch(nodes: Sequence[Node]) -> list[Value]:
    """Give operators that ask for scratch memory some of the program's; return it.

    Note [Scratch]: such an operator has two arguments, ``scratch`` and ``scratch_bytes``. In eager
    mode it is given none and makes its own. In a program it is planned like the result of an
    operator, so that it lies where activations were, and a replay allocates nothing for it.

    Args:
        nodes: The program.
    """
    given = []
    for index, node in enumerate(nodes):
        places = scratch_places(node.op)
        num_bytes = 0 if places is None else node.args[places[1]]
        if places is not None and num_bytes and node.args[places[0]] is None:
            # Of no storage that there is: no operator has made it.
            info = StorageInfo(StorageWeakRef(torch.empty(0).untyped_storage()), False, False)
            geometry = (0, (num_bytes,), (1,), torch.uint8, False, False)
            node.args[places[0]] = value = Value(info, geometry, index)
            node.touched.append(info)
            given.append(value)
    return given
