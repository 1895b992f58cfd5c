"""Puts measured numbers into the README, between markers; a test compares the two.

``<!-- paired_cpu: begin -->`` and ``<!-- paired_cpu: end -->`` stand around the table of
`make bench`, ``zoo_speed`` around that of the small architectures, ``gpu_check`` around that of
the newest `make gpu-check`.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.timing import Spread

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; every column but the first two is aligned to the right."""
    rule = tuple("---" if index < 2 else "---:" for index in range(len(heading)))
    return "\n".join("| " + " | ".join(row) + " |" for row in (heading, rule, *rows))


def paired_cpu(results: pathlib.Path) -> str | None:
    """Return the table of `make bench`, or None where there is no result."""
    path = results / "paired_cpu.json"
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text())
    rows = []
    for result in document["workloads"]:
        eager = result["speed"]["none"]["step_ms"]
        for scope, speed in result["speed"].items():
            peak = result["memory"].get(scope)
            if speed["speedup"] is None:
                continue
            rows.append(
                (
                    f"{result['name']}, {result['batch']} tokens, {result['num_threads']} thread"
                    + ("s" if result["num_threads"] > 1 else ""),
                    f"`{scope}`",
                    f"{eager:.2f}",
                    f"{speed['step_ms']:.2f}",
                    str(Spread(**speed["speedup"])),
                    f"{peak['process_peak_bytes_ratio']:.2f}" if peak else "",
                    f"{peak['replay_peak_bytes_ratio']:.2f}" if peak else "",
                    f"{peak['peak_bytes_ratio']:.2f}" if peak else "",
                )
            )
    heading = (
        "workload",
        "scope",
        "eager ms/step",
        "ms/step",
        "times as fast as eager: median (min to max)",
        "peak memory of the process / eager's",
        "the same less libraries, replays",
        "with the recording",
    )
    facts = document["environment"]
    numbers = ", ".join(f"{r['num_rounds']} for {r['name']}" for r in document["workloads"])
    note = (
        f"Measured {facts['date']} on {facts['cpu']} ({facts['num_cpus']} cores), "
        f"torch {facts['torch']}, Python {facts['python']}; pairs: {numbers}."
    )
    return f"{markdown(heading, rows)}\n\n{note}"


def zoo_speed(results: pathlib.Path) -> str | None:
    """Return the table of ``python -m benchmarks.zoo_speed``, or a sentence without a result."""
    path = results / "zoo_speed.json"
    if not path.exists():
        return "Not measured yet: `python -m benchmarks.zoo_speed`."
    document: dict[str, Any] = json.loads(path.read_text())
    rows = [
        (
            result["name"],
            str(result["num_ops"]),
            f"{result['eager_ms']:.2f}",
            f"{result['replay_ms']:.2f}",
            str(Spread(**result["speedup"])),
        )
        for result in document["architectures"]
    ]
    rows.append(("geometric mean", "", "", "", f"{document['geometric_mean']:.2f}"))
    facts = document["environment"]
    heading = (
        "architecture (width 32, 4 rows)",
        "operators",
        "eager ms/step",
        "ms/step",
        "times as fast as eager: median (min to max)",
    )
    note = (
        f"Measured {facts['date']} on one thread of {facts['cpu']} ({facts['num_cpus']} cores), "
        f"torch {facts['torch']}, Python {facts['python']}; {document['num_rounds']} pairs each. "
        f"Other programs ran meanwhile (load average {document['load_average_before']:.1f} at the "
        "start). Losses were equal bit for bit."
    )
    return f"{markdown(heading, rows)}\n\n{note}"


def gpu_check(results: pathlib.Path) -> str | None:
    """Return the table of the newest `make gpu-check`, or a sentence where there is none."""
    documents = [json.loads(path.read_text()) for path in results.glob("gpu_check_*.json")]
    documents = [found for found in documents if found["environment"]["gpu"]]
    if not documents:
        return "No GPU has been measured yet."
    newest = max(documents, key=lambda found: str(found["environment"]["date"]))
    rows = [
        (part["name"], row["what"], row["result"], "yes" if row["ok"] else "**no**")
        for part in newest["parts"]
        for row in part["rows"]
    ]
    facts = newest["environment"]
    note = (
        f"Measured {facts['date']} on one {facts['gpu']}, driver {facts['driver']}, "
        f"torch {facts['torch']}, Triton {facts['triton']}, Python {facts['python']}."
    )
    return f"{markdown(('part', 'what', 'result', 'good'), rows)}\n\n{note}"


SECTIONS: Mapping[str, Callable[[pathlib.Path], str | None]] = {
    "paired_cpu": paired_cpu,
    "zoo_speed": zoo_speed,
    "gpu_check": gpu_check,
}


def updated(text: str, results: pathlib.Path = RESULTS) -> str:
    """Return ``text`` with the present numbers between its markers."""
    for name, make in SECTIONS.items():
        table = make(results)
        if table is not None:
            begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
            pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
            block = f"{begin}\n{table}\n{end}"
            text = pattern.sub(lambda _, block=block: block, text)  # type: ignore[misc]
    return text


def main() -> int:
    """Rewrite the README's tables."""
    text = README.read_text(encoding="utf-8")
    if not any(f"<!-- {name}: begin -->" in text for name in SECTIONS):
        markers = ", ".join(f"<!-- {name}: begin --> ... <!-- {name}: end -->" for name in SECTIONS)
        print(f"README.md has no place for the numbers; put one of these in: {markers}")
        return 2
    README.write_text(updated(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
