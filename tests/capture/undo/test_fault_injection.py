"""A fault at every operator of warm-ups and captures: nothing changes, and it goes on."""

import pytest
import torch

from fault_training import CASES, Training, expected, fail_everywhere, without_kept
from helpers import assert_same_state, snapshot


@pytest.mark.parametrize("name", CASES)
def test_a_fault_at_any_operator_of_warm_up_and_capture_leaves_no_trace(name: str) -> None:
    reference = expected(name)
    training = Training(name)
    num_faults = []
    for index, (loss, state) in enumerate(reference):
        if index <= 2:  # two warm-ups and the capture
            # Of the larger models, whose recordings take longer, a part.
            stride = 1 if name == "tiny" else (7, 7, 17)[index]
            got, count = fail_everywhere(training, index, stride)
            num_faults.append(count)
        else:
            got = training.step(training.batch(index))
        assert torch.equal(got, loss), index
        now = without_kept(snapshot(training.model, training.optim))
        assert_same_state(state, now, f"call {index}")
    assert min(num_faults) >= 8, num_faults
    assert training.step.report().num_captures == 1
    training.step.close()
