"""The directory that keeps a run of the benchmark: JSON, Markdown, HTML, pictures."""

import datetime
from pathlib import Path

from graphfsdp.bench.page import page
from graphfsdp.bench.plots import draw_all
from graphfsdp.bench.record_files import write_result
from graphfsdp.bench.records import BenchResult
from graphfsdp.bench.tables import report_markdown
from graphfsdp.errors import ConfigError
from graphfsdp.training.run_directory import refuse_used_directory

PROFILES = "profile"
RESULT, REPORT, PAGE = "result.json", "report.md", "report.html"


def make_directory(out: str | None) -> Path:
    """Make the directory, so that an impossible one is refused before anything is measured.

    Raises:
        ConfigError: it holds something, or cannot be made.
    """
    if out is None:
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        out = str(Path("runs") / f"bench-{now}")
    refuse_used_directory(out)
    path = Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be made ({error.strerror}); give a directory that can"
        ) from None
    return path


def write_directory(result: BenchResult, folder: Path, *, pictures: bool = True) -> None:
    """Write everything that is known so far; may be called again when more is."""
    write_result(result, folder / RESULT)
    drawn = draw_all(result, folder) if pictures else []
    (folder / REPORT).write_text(report_markdown(result, drawn), encoding="utf-8")
    text = page(result, [folder / name for name in drawn])
    (folder / PAGE).write_text(text, encoding="utf-8")
