"""NCCL registers no buffers in a capture where nobody has chosen."""

import logging
import os
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from graphfsdp._capture.cuda import graph

NAME = "NCCL_GRAPH_REGISTER"


@pytest.mark.parametrize("chosen", [None, "0", "1"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["nccl", "nccl2", "gloo"])
def test_registration_is_turned_off_once_where_nobody_has_chosen(
    kind: str,
    num_ranks: int,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(NAME, chosen or "")  # so that what is set here is taken back
    if chosen is None:
        monkeypatch.delenv(NAME)
    group, backend = SimpleNamespace(size=lambda: num_ranks), SimpleNamespace(name=lambda: kind)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(graph, "all_groups", lambda: [group])
    monkeypatch.setattr(graph, "backends_of", lambda group: iter([backend]))
    caplog.set_level(logging.INFO, "graphfsdp")
    for _ in range(2):
        graph.turn_registration_off()
    is_turned_off = chosen is None and num_ranks == 2 and kind != "gloo"
    assert os.environ.get(NAME) == ("0" if is_turned_off else chosen)
    assert len(caplog.records) == is_turned_off
