"""pykvq-bench on a model: every format at every depth, and what is written."""

import json
import os

from pykvq.bench import BASELINE
from pykvq.cli.bench import main


def test_bench_smollm2(smollm2_path, tmp_path, capsys):
    target = tmp_path / "bench.json"
    arguments = ["--kv", "q8_0,ultra4", "--depth", "0,1500", "--prefill", "64", "--gen", "2", "--repeat", "2"]
    before = os.environ.get("PYKVQ_FLASH_ATTN")
    assert main([str(smollm2_path), *arguments, "--json", str(target)]) == 0
    assert os.environ.get("PYKVQ_FLASH_ATTN") == before
    assert len(capsys.readouterr().out.splitlines()) == 3 + 6
    result = json.loads(target.read_text())
    assert len(result["model"]["sha256"]) == 64
    rows = {(row["kv"], row["depth"]): row for row in result["rows"]}
    assert set(rows) == {(kv, depth) for kv in (BASELINE, "q8_0", "ultra4") for depth in (0, 1500)}
    for row in rows.values():
        assert row["prefill_tps"] > 0 < row["decode_tps"]
        assert len(row["decode_seconds"]) == 2
    f16, q8, ultra4 = (rows[kv, 1500] for kv in (BASELINE, "q8_0", "ultra4"))
    assert f16["route"] == "llama.cpp flash attention (cpu)"
    assert ultra4["route"] == "pykvq tiered flash attention (cpu)"
    assert q8["kv_bytes"] / f16["kv_bytes"] == 8.5 / 16
    # a fifth of 1500 tokens is still in the first tier
    assert ultra4["kv_bytes_used"] < 0.5 * f16["kv_bytes_used"]
