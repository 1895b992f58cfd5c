"""Limits that count what a busy machine leaves of the time."""

import os

import pytest

import time_limits


@pytest.mark.parametrize(
    ("tasks", "lasts_s"), [(0.5, 60), (2.0, 120), (1e6, 60 * time_limits.MOST)]
)
def test_a_limit_lasts_as_long_as_tasks_take(
    tasks: float, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time_limits, "monotonic", lambda: now)
    monkeypatch.setattr(os, "getloadavg", lambda: (tasks * (os.cpu_count() or 1), 0.0, 0.0))
    limit = time_limits.Limit(60)
    while (left_s := limit.left_s()) > 0:
        now += left_s
    assert now == pytest.approx(lasts_s)
    # Nor does it last long when they have ended meanwhile.
    limit = time_limits.Limit(60)
    now += limit.left_s()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert now == pytest.approx(lasts_s + 60)
    assert limit.left_s() == 0.0
