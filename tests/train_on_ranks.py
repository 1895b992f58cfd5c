"""Started by torchrun: runs the command line once per entry of a plan, each in a new group.

The plan is a JSON list of runs: a name, an argument list per rank, and a port for its process
group. What rank r printed and how it ended is kept in ``NAME.r.json`` beside the plan.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch

from graphfsdp import cli


def main() -> None:
    plan, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    cli._SAY_FIRST_S = 0.0  # no launcher acts on the end of a run here
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # it can serve one process group only
    for run in json.loads(plan.read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        shown, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(errors):
            code = cli.main(run["arguments"][rank])
        kept = {"code": code, "out": shown.getvalue(), "err": errors.getvalue()}
        plan.with_name(f"{run['name']}.{rank}.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
