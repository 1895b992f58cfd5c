"""The command line as torchrun starts it, whose rank 1 is killed in its first attempt.

    torchrun ... kill_once.py FIRST_SAMPLE train ...

It ends while batches from that one on are made ready, as if its machine were gone.
"""

import os
import signal
import sys
from typing import Any

from graphfsdp.cli import main
from graphfsdp.data import TokenBatches


def die_at(first_sample: int) -> None:
    original = TokenBatches.batch

    def batch(batches: TokenBatches, sample: int) -> Any:
        if sample >= first_sample:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(batches, sample)

    setattr(TokenBatches, "batch", batch)  # noqa: B010


if __name__ == "__main__":
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
        die_at(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
