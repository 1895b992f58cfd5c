"""A model on the meta device that takes its values from a checkpoint instead of initialisations."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from graphfsdp.base.sharded import sharded_roots
from graphfsdp.sharding.materialize.materialize import materialize, target_device
from graphfsdp.sharding.materialize.meta_tensors import give_memory, give_up_memory
from graphfsdp.sharding.module import FSDPModule, shards_of, unit_of


@contextmanager
def memory_for_values(model: nn.Module) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Give memory to what is on the meta device, for values that the body brings.

    What the body does not bring is initialised as by ``materialize`` afterwards, without moving
    the state of a generator: buffers that no state dict holds, and what a checkpoint lacks. If
    the body raises, the model awaits all its values as before.

    Args:
        model: Sharded or not; nothing happens if none of it is on the meta device.

    Yields:
        A function to call with the tensors that have values now.

    Raises:
        ConfigError: something is left that nothing initialises; what was brought stays.
    """
    units = [unit_of(m) for m in model.modules() if isinstance(m, FSDPModule)]
    managed = {id(item.param): item for unit in units for item in unit.group.managed}
    plain = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and tensor.is_meta and id(tensor) not in managed
    }
    awaits = any(unit.group.awaits_values for unit in units)
    if not (awaits or plain or any(buffer.is_meta for buffer in model.buffers())):
        yield lambda tensors: None
        return
    device = target_device(None, units)
    if awaits:
        for root in sharded_roots(model):
            shards_of(root).move_to(device)
    for name, tensor in plain.items():
        if tensor.is_meta:  # not given memory under another name
            give_memory(tensor, device, name)
    brought: set[int] = set()
    try:
        yield lambda tensors: brought.update(id(tensor) for tensor in tensors)
    except BaseException:
        brought.clear()
        raise
    finally:
        for key in brought & set(managed):
            managed[key].awaited = None
        for name, tensor in plain.items():
            if id(tensor) not in brought and not tensor.is_meta:
                give_up_memory(tensor, name)
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        materialize(model, device)
