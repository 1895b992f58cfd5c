"""How far a step is from the time that its kernels alone take."""

from collections.abc import Callable, Sequence

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from graphfsdp.bench.records import RooflineRecord

OPERATORS = "the recorded operators of full_iteration, each timed alone in replays that are undone"
KERNELS = "kernels, copies and fills of {} steps under torch.profiler; has not run on a GPU yet"


def operator_roofline(operator_us: Sequence[float], step_ms: float) -> RooflineRecord:
    """Compare a step on a CPU with the sum over its operators."""
    kernel_ms = sum(operator_us) / 1e3
    count = sum(1 for time in operator_us if time > 0)
    return RooflineRecord(OPERATORS, kernel_ms, float(count), step_ms / kernel_ms)


def kernel_roofline(steps: Sequence[Callable[[], object]], step_ms: float) -> RooflineRecord | None:
    """Run some steps under the profiler and compare a step with the sum over its GPU kernels.

    The sum is the limit where no two kernels run at a time. None where the profiler saw no kernel.
    """
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        for step in steps:
            step()
        torch.cuda.synchronize()
    events = [
        event
        for event in profiler.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    kernel_ms = sum(event.self_device_time_total for event in events) / 1e3 / len(steps)
    if not kernel_ms:
        return None
    how = KERNELS.format(len(steps))
    return RooflineRecord(how, kernel_ms, len(events) / len(steps), step_ms / kernel_ms)
