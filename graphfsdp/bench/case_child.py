"""A process that measures one case, or the memory of one contender, and ends.

``python -m graphfsdp.bench.case_child REQUEST`` reads the file, tells on its standard output what
it is doing, and writes the result beside the request. So a contender that takes its process down
is named, and costs nobody else's numbers.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from graphfsdp.bench.contender import Setting
from graphfsdp.bench.contenders import find_contenders
from graphfsdp.bench.measure import MeasureOptions, measure_case
from graphfsdp.bench.memory import measure_memory
from graphfsdp.bench.record_files import from_data, to_json
from graphfsdp.bench.workloads import DTYPES, Case, find_workload
from graphfsdp.errors import ConfigError

PREFIX = "::bench "
EXIT_CONFIG = 3


@dataclass(frozen=True)
class ChildRequest:
    """What a child is to measure, in plain values.

    Attributes:
        contenders: Names of those to measure.
        excluded: Those that ended an earlier child, each with how.
        limit_s: Seconds of the whole case; None for no limit.
        memory: Measure the memory of the one contender instead of times.
    """

    workload: str
    dtype: str
    batch_size: int
    contenders: tuple[str, ...]
    device: str
    seed: int
    num_threads: int
    seconds: float
    data: str | None
    random_tokens: bool
    roofline: bool
    profile: str | None = None
    nsys: bool = False
    memory: bool = False
    excluded: tuple[tuple[str, ...], ...] = ()
    limit_s: float | None = None

    def setting(self) -> Setting:
        """Return what is to be trained."""
        (dtype,) = (name for name in DTYPES if name == self.dtype)
        case = Case(find_workload(self.workload), dtype, self.batch_size)
        return Setting(case, torch.device(self.device), self.seed)

    def options(self) -> MeasureOptions:
        """Return how it is to be measured."""
        return MeasureOptions(
            seconds=self.seconds,
            data=self.data,
            random_tokens=self.random_tokens,
            roofline=self.roofline,
            profile=self.profile,
            nsys=self.nsys,
            excluded=tuple((name, reason) for name, reason in self.excluded),
            limit_s=math.inf if self.limit_s is None else self.limit_s,
        )


def result_path(request: Path) -> Path:
    """Return where the child puts what it found."""
    return request.with_suffix(".result.json")


def _say(phase: str, name: str, share: float) -> None:
    sys.stdout.write(f"{PREFIX}{json.dumps([phase, name, share])}\n")
    sys.stdout.flush()


def main() -> int:
    """Measure."""
    path = Path(sys.argv[1])
    request = from_data(ChildRequest, json.loads(path.read_text(encoding="utf-8")), "request")
    torch.set_num_threads(request.num_threads)
    specs = find_contenders(request.contenders)
    record: object
    try:
        if request.memory:
            (spec,) = (spec for spec in specs if spec.name == request.contenders[0])
            record = measure_memory(request.setting(), spec, request.options())
        else:
            record = measure_case(request.setting(), specs, request.options(), _say)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    result_path(path).write_text(to_json(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
