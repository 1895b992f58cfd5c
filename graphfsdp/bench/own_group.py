"""A process group of one rank, for contenders that cannot do without."""

import contextlib
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from graphfsdp.bench.contender import ContenderSpec, Setting


@contextlib.contextmanager
def group_for(specs: Sequence[ContenderSpec], setting: Setting) -> Iterator[None]:
    """Keep a group of one rank where a contender needs one and no launcher has made any."""
    if dist.is_initialized() or not any(spec.needs_group for spec in specs):
        yield
        return
    on_gpu = setting.device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=HashStore(),
        rank=0,
        world_size=1,
        device_id=setting.device if on_gpu else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
