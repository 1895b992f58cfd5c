"""A second communicator for the ranks of a group, so that collectives do not queue up."""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def gather_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the communicator that all-gathers of a group use; made once for each group.

    torch keeps it with all others, so ``destroy_process_group()`` closes it. All ranks of the
    group must call this together.

    Args:
        group: The ranks.

    Returns:
        Another group of the same ranks; the group itself where one cannot be made: for one rank,
        or where the ranks hold different numbers of groups, from which torch takes the name.
    """
    if group.size() == 1:
        return group
    description = f"graphfsdp all-gather of {group.group_name}"
    found = next((pg for pg in c10d._world.pg_map if pg.group_desc == description), None)
    everyone: list[tuple[int, bool]] = [(0, False)] * group.size()
    dist.all_gather_object(everyone, (len(c10d._world.pg_names), found is not None), group)
    if all(has for _, has in everyone):
        assert found is not None
        return found
    if len(set(everyone)) > 1:
        return group
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout(group),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,  # only the ranks of this group are here
        group_desc=description,
    )
    return made


def _timeout(group: dist.ProcessGroup) -> Any:
    """Return how long the group waits for its ranks; None, torch's default, if it does not say."""
    types = group._device_types
    if not types:  # a group that is written in Python
        return None
    options = getattr(group._get_backend(types[0]), "options", None)
    return getattr(options, "_timeout", None)
