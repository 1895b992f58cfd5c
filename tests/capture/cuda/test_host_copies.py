"""State that is kept in page-locked memory while an iteration is tried."""

from typing import Any

import pytest
import torch
from torch import Tensor

from graphfsdp._capture.cuda import host_copies
from graphfsdp._capture.cuda.host_copies import HostCopies, PinnedMemory


@pytest.mark.gpu
@pytest.mark.parametrize("is_granted", [True, False])
def test_attempts_use_the_same_page_locked_memory(
    is_granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or memory of the other kind where the system grants none of this."""
    monkeypatch.setattr(host_copies, "_CHUNK_BYTES", 64)
    make = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        if options.get("pin_memory") and not is_granted:
            raise RuntimeError("CUDA error: out of memory")
        made: Tensor = make(*args, **options)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    state = [torch.arange(n, dtype=torch.float32, device="cuda") for n in (5, 0, 50, 16)]
    before, memory, places = [each.clone() for each in state], PinnedMemory(), set()
    for _ in range(3):
        copies = HostCopies([*state, state[2][3:]], memory)
        inner = HostCopies(state[:1], PinnedMemory())
        places.add(tuple(sorted(chunk.data_ptr() for chunk in copies._chunks)))
        assert len(copies._chunks) == -(-71 * 4 // 64)
        assert {chunk.is_pinned() for chunk in copies._chunks} == {is_granted}
        for each in state:
            each.add_(1)
        inner.roll_back()
        copies.roll_back()
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
        del copies
    assert len(places) == 1
    memory.end()
    assert memory.take(64)[0].is_pinned() == is_granted
