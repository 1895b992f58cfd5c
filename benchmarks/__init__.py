"""Measurements of graphfsdp, run from a checkout and never installed."""

import importlib.util
import sys

_missing = [name for name in ("torch", "rich") if importlib.util.find_spec(name) is None]
if _missing:
    print(
        f"{sys.executable} has no {' and no '.join(_missing)}; run this with a Python that has "
        "(make gpu-check PYTHON=...), or with .venv/bin/python after `make train`",
        file=sys.stderr,
    )
    raise SystemExit(2)
