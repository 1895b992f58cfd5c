"""Settings of NCCL and torch that captured collectives need, or cannot have.

Note [Registered buffers]: in captures alone NCCL registers the buffers of collectives
(NCCL_GRAPH_REGISTER is 1 by default). That is where captured collectives hang and eager ones do
not: with expandable segments below compute capability 10 (pytorch/pytorch#158029,
pytorch/torchtitan#3306), over a network where a small collective comes before a large one on the
same connection (NVIDIA/nccl#2389), and on machines with an NVSwitch in the registration itself,
which waits on the host for all local ranks without a look at the abort flag. What it brings is a
copy less where NCCL could read and write the buffers directly. So it is turned off where nobody has
chosen. NCCL reads the variable when the first collective of the process is captured.
"""

import logging
import os

import torch
import torch.distributed as dist

from graphfsdp._capture.ranks.group_ends import backends_of
from graphfsdp.base.torch_internals import all_groups
from graphfsdp.errors import ConfigError

_LOG = logging.getLogger("graphfsdp")
_REGISTER = "NCCL_GRAPH_REGISTER"
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OFF = ("", "0", "n", "no", "f", "false")
_REGISTERS_SEGMENTS = (10, 0)  # compute capability from which on expandable segments are safe


def prepare_nccl(device: torch.device) -> None:
    """Choose what nobody has chosen; ConfigError for what captured collectives cannot have."""
    if not (dist.is_available() and dist.is_initialized() and _has_nccl_ranks()):
        return
    blocking = next((name for name in _BLOCKING if _is_on(name)), None)
    if blocking is not None:
        raise ConfigError(
            f"{blocking}={os.environ[blocking]}: every collective would ask on the host whether it "
            "has run, which is an error 907 in a capture. Remedy: unset it; a rank that is lost is "
            "found without it, by torch's watchdog and in replays by graphfsdp's"
        )
    chosen = os.environ.get(_REGISTER)
    if chosen is None:
        os.environ[_REGISTER] = "0"
        _LOG.info(
            "%s=0 is set: registered buffers are where captured collectives of NCCL hang; set it "
            "yourself to choose (docs/scale.md)",
            _REGISTER,
        )
    elif chosen != "0" and _has_expandable_segments() and _capability(device) < _REGISTERS_SEGMENTS:
        raise ConfigError(
            f"{_REGISTER}={chosen} with expandable_segments:True on compute capability "
            f"{'.'.join(map(str, _capability(device)))}: NCCL would register memory that cannot be "
            "registered, and hang or read elsewhere (pytorch/pytorch#158029). Remedy: unset "
            f"{_REGISTER}, or leave expandable_segments out of {' and '.join(_ALLOCATOR)}"
        )


def _has_nccl_ranks() -> bool:
    return any(
        "nccl" in backend.name()  # torch 2.15 calls it nccl2
        for group in all_groups()
        if group.size() > 1
        for backend in backends_of(group)
    )


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _has_expandable_segments() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in _ALLOCATOR)
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
