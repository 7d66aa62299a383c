"""The ageing cost that tools/bench_ageing.py computes from token latencies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "bench_ageing.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_ageing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_share_is_what_ageing_tokens_take_above_their_neighbours(bench):
    # tokens become slower as the context grows; every 64th takes 0.01 s more
    seconds = np.linspace(0.010, 0.020, 640)
    moved = np.where(np.arange(640) % 64 == 32, 64, 0)
    cost = bench.ageing_cost(seconds + np.where(moved > 0, 0.01, 0.0), moved)
    assert cost.n_ageing == 10
    assert cost.ageing_share == pytest.approx(10 * 0.01 / (seconds.sum() + 0.1), rel=0.01)
    assert cost.p50 == pytest.approx(15.0, rel=0.01)
    assert cost.p99_over_p50 == pytest.approx(cost.p99 / cost.p50)


def test_no_ageing_costs_nothing(bench):
    cost = bench.ageing_cost(np.full(100, 0.01), np.zeros(100, dtype=np.int64))
    assert (cost.n_ageing, cost.ageing_share, cost.ageing_median) == (0, 0.0, 0.0)
    assert cost.p99_over_p50 == pytest.approx(1.0)
