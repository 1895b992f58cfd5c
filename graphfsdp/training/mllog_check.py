"""The official compliance checker, asked about a log."""

import importlib.util
import subprocess
import sys
from pathlib import Path

RULESET = "6.1.0"
RULES = Path(__file__).with_name("mllog_rules.yaml")
_MAX_CHARACTERS = 400


def rules_for(benchmark: str) -> Path | None:
    """Return the rules for a benchmark of ours; None for one that the checker itself knows."""
    package = importlib.util.find_spec("mlperf_logging")
    if package is None or package.origin is None:
        return RULES
    folder = Path(package.origin).parent / "compliance_checker" / f"training_{RULESET}"
    return None if (folder / f"closed_{benchmark}.yaml").exists() else RULES


def compliance_complaint(log: Path, benchmark: str) -> str:
    """Return what the official checker says against a log; empty if it accepts it.

    Its whole answer is kept beside the log, with ``.compliance`` added to the name.
    """
    rules = rules_for(benchmark)
    kept = log.with_name(log.name + ".compliance")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mlperf_logging.compliance_checker"),
            *("--usage", "training", "--ruleset", RULESET, "--log_output", str(kept)),
            *(() if rules is None else ("--config", str(rules))),
            str(log),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    said = [line for line in done.stderr.splitlines() if not line.startswith("INFO")]
    return " ".join(" ".join(said).split())[:_MAX_CHARACTERS] or "no answer"
