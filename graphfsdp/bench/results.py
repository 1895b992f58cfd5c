"""What a benchmark has found: JSON lines, one for each contender of each case, and tables of them.

The first line is of the run: environment and options. A case is a workload, a precision and a
batch size; each of its lines repeats what was trained, so that a line is whole by itself. A
contender that could not run has a ``reason`` in place of times, and so has a case without any.
"""

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.markdown import Markdown

from graphfsdp.errors import ConfigError

KIND, VERSION = "graphfsdp_bench", 3
RESULT = "result.jsonl"
# The contender that all others are compared with: our code path, run eagerly.
REFERENCE = "eager"
NOT_MLPERF = "MLPerf-style conventions; result not verified by MLCommons Association."

Row = dict[str, Any]


@dataclass
class Result:
    """``head`` is the first line, ``rows`` are the others, in the order of the cases."""

    head: Row
    rows: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        lines = [{"kind": KIND, "version": VERSION, **self.head}, *self.rows]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Also take a result directory."""
        source = path / RESULT if path.is_dir() else path
        head, *rows = map(json.loads, source.read_text(encoding="utf-8").splitlines())
        kind, version = head.pop("kind"), head.pop("version")
        if (kind, version) != (KIND, VERSION):
            raise ConfigError(
                f"{source} is {kind!r} of version {version}, not {VERSION} of {KIND!r}"
            )
        return cls(head, rows)

    @property
    def cases(self) -> list[str]:
        """Those in which somebody ran."""
        return list(dict.fromkeys(row["case"] for row in self.rows if "step_ms" in row))

    def of(self, case: str) -> list[Row]:
        """Return the contenders that ran in a case."""
        return [row for row in self.rows if row["case"] == case and "step_ms" in row]

    @property
    def names(self) -> list[str]:
        """Return the contenders that ran anywhere, the reference first."""
        ran = (row["contender"] for row in self.rows if "step_ms" in row)
        return list(dict.fromkeys([REFERENCE, *ran]))

    def reasons(self) -> dict[str, str]:
        """Return contenders that ran in no case, and cases without any, each with the first one."""
        found: dict[str, str] = {}
        for row in self.rows:
            who: str = row.get("contender") or row["case"]
            if "reason" in row and who not in self.names:
                found.setdefault(who, row["reason"])
        return found

    def ratios(self, case: str, name: str, base: str = REFERENCE) -> list[float]:
        """How many times as fast as the base, by round; empty where one of them did not run."""
        rows = {row["contender"]: row for row in self.of(case)}
        if name not in rows or base not in rows:
            return []
        theirs, mine = (map(statistics.fmean, rows[who]["step_ms"]) for who in (base, name))
        return [a / b for a, b in zip(theirs, mine, strict=True)]


def median_ms(row: Row) -> float:
    steps: list[float] = [step for window in row["step_ms"] for step in window]
    return statistics.median(steps)


@dataclass(frozen=True)
class Table:
    """The first ``num_left`` columns are aligned to the left."""

    title: str
    heading: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    num_left: int = 1

    def markdown(self) -> str:
        """Return the table in Markdown, without the title."""
        rule = tuple("---" if i < self.num_left else "---:" for i in range(len(self.heading)))
        lines = (self.heading, rule, *self.rows)
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines
        )

    def rich(self) -> Markdown:
        return Markdown(f"{self.title}\n\n{self.markdown()}")


def spread_text(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def losses_text(row: Row) -> str:
    if row["contender"] == REFERENCE:
        return "reference"
    if row["bit_exact"]:
        return f"equal bit for bit ({row['num_steps']} steps)"
    if row["max_difference"] is None or row["early_difference"] is None:
        return "not finite"
    return (
        f"{row['early_difference']:.1e} in the first steps, {row['max_difference']:.1e} in "
        f"{row['num_steps']}"
    )


def workload_text(row: Row) -> str:
    items = f"x {row['items_per_sample']} tokens" if row["unit"] == "tokens" else row["unit"]
    return f"{row['workload']} {row['dtype']}, {row['batch_size']} {items}"


def environment_text(environment: Row) -> str:
    where = environment["gpu"] or f"{environment['cpu']} ({environment['num_cpus']} cores)"
    parts = [f"Measured {environment['date'][:10]} on {where}"]
    if environment["gpu"] is None:
        plural = "s" if environment["num_threads"] > 1 else ""
        parts.append(f"{environment['num_threads']} thread{plural}")
    if environment["num_ranks"] > 1:
        parts.append(f"{environment['num_ranks']} ranks ({environment['backend']})")
    parts.append(f"torch {environment['torch']}")
    if environment["driver"] is not None:
        parts.append(f"CUDA {environment['cuda']}, driver {environment['driver']}")
    text = ", ".join([*parts, f"Python {environment['python']}"])
    load = environment["load_average"]
    if load is not None and load > 0.5:
        text += f"; other programs ran meanwhile (load average {load:.1f})"
    return f"{text}."


def find_environment(device: torch.device, *, num_ranks: int = 1) -> Row:
    """Return what numbers are measured on; None is unknown or not there.

    ``date`` is UTC; threads are torch's on the CPU, in each process; ``load_average`` counts
    programs that ran before the start; ``driver`` of a GPU also says how fast it may be.
    """
    gpu = driver = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        query = "--query-gpu=driver_version,clocks.max.sm,power.limit"
        number = f"--id={device.index or 0}"
        driver = _output_of("nvidia-smi", query, "--format=csv,noheader", number)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count() or 1,
        "num_threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "backend": None if num_ranks == 1 else "gloo" if gpu is None else "nccl",
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "driver": driver,
    }


def _commit() -> str | None:
    """Return the commit of the checkout that this package is in, None where it is in none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _output_of("git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*")


def _output_of(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()


def overview(result: Result) -> Table:
    """Return a row for each case and a column for each contender."""

    def cell(case: str, name: str) -> str:
        found = [median_ms(row) for row in result.of(case) if row["contender"] == name]
        ratios = result.ratios(case, name)
        if name == REFERENCE or not ratios:
            return f"{found[0]:.2f}" if found else "-"
        return f"{found[0]:.2f} ({statistics.median(ratios):.2f}x)"

    names = result.names
    rows = tuple(
        (workload_text(result.of(case)[0]), *(cell(case, name) for name in names))
        for case in result.cases
    )
    title = "milliseconds per step (median), and how many times as fast as eager (median of pairs)"
    return Table(title, ("workload", *names), rows)


def case_table(result: Result, case: str) -> Table:
    """Return a row for each contender of a case, without columns in which nothing stands."""
    first = result.of(case)[0]
    rows = []
    for row in result.of(case):
        ratios = spread_text(result.ratios(case, row["contender"]))
        items = row["batch_size"] * row["items_per_sample"]
        rows.append(
            {
                "contender": row["contender"],
                "times as fast as eager": "" if row["contender"] == REFERENCE else ratios,
                "ms/step": f"{median_ms(row):.3f}",
                f"{first['unit']}/s": f"{items / median_ms(row) * 1e3:,.0f}",
                "init s": f"{row['init_ms'] / 1e3:.2f}",
                "losses against eager": losses_text(row),
            }
        )
    heading = tuple(name for name in rows[0] if any(row[name] for row in rows))
    windows = first["step_ms"]
    title = f"{workload_text(first)}: {len(windows)} windows of {len(windows[0])} steps, in turns"
    return Table(title, heading, tuple(tuple(row[name] for name in heading) for row in rows))
