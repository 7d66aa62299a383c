"""pykvq-bench's arithmetic and its table; tests/model/test_bench_smollm2.py runs it on a model."""

import pytest
from tiny_models import TinyModel

from pykvq.bench import BASELINE, BenchRow, BenchSettings, _add_ratios, bench
from pykvq.cli.bench import main, table
from pykvq.errors import InvalidArgumentError


def row(kv: str, depth: int, prefill: float, decode: float, used: int = 0) -> BenchRow:
    return BenchRow(kv, depth, "route", prefill_tps=prefill, decode_tps=decode, kv_bytes=2 * used, kv_bytes_used=used)


def test_ratios_are_to_the_baseline_at_the_same_depth():
    rows = [
        row(BASELINE, 0, 100, 10),
        row("q4_ve", 0, 150, 20),
        row(BASELINE, 64, 50, 5),
        row("q4_ve", 64, 25, 10, 10**8),
    ]
    _add_ratios(rows)
    assert [(r.prefill_ratio, r.decode_ratio) for r in rows] == [(1, 1), (1.5, 2), (1, 1), (0.5, 2)]
    # 100 ms a token at depth 64, 50 ms at depth 0: 0.1 GB in 50 ms
    assert rows[3].attention_gbps == pytest.approx(2.0)
    assert rows[1].attention_gbps is None


def test_bandwidth_needs_depth_0():
    rows = [row(BASELINE, 64, 50, 5), row("q4_ve", 64, 25, 10, 10**8)]
    _add_ratios(rows)
    assert [r.attention_gbps for r in rows] == [None, None]


@pytest.mark.parametrize(
    "settings",
    [BenchSettings(n_gen=0), BenchSettings(n_repeat=0), BenchSettings(depths=()), BenchSettings(depths=(-1,))],
)
def test_nothing_to_measure(settings, tmp_path):
    with pytest.raises(InvalidArgumentError):
        bench(tmp_path / "none.gguf", settings)


def test_depth_must_be_numbers(tmp_path, capsys):
    assert main([str(tmp_path / "none.gguf"), "--depth", "0,many"]) == 2
    assert "--depth '0,many' is not a list of numbers" in capsys.readouterr().err


def test_a_format_with_types_of_layers_is_one(tmp_path, capsys, monkeypatch):
    def run(_path, settings, **_kwargs):
        raise InvalidArgumentError(" and ".join(settings.kv))

    monkeypatch.setattr("pykvq.bench.bench", run)
    assert main([str(TinyModel().write(tmp_path / "tiny.gguf")), "--kv", "f16:128+q4_ve@k3=q8_0,v3=q8_0,q8_0"]) == 2
    assert "error: f16:128+q4_ve@k3=q8_0,v3=q8_0 and q8_0\n" in capsys.readouterr().err


def test_the_model_is_not_written_over(tmp_path, capsys):
    path = TinyModel().write(tmp_path / "tiny.gguf")
    assert main([str(path), "--json", str(path)]) == 2
    assert "write to another file" in capsys.readouterr().err


def test_table():
    rows = [row(BASELINE, 0, 100, 10), row("q4_ve", 0, 150, 20)]
    rows[1].calibrated = True
    _add_ratios(rows)
    result = {
        "model": {"name": "tiny.gguf"},
        "settings": {"n_prefill": 512, "n_gen": 64, "n_repeat": 5},
        "read_gbps": 20.0,
        "rows": [vars(r) for r in rows],
    }
    lines = table(result)
    assert len(lines) == 5
    assert lines[1] == "calibrated: q4_ve"
    assert lines[4].split()[:2] == ["0", "q4_ve"]
    assert lines[4].split()[-4:] == ["150.0", "1.50", "20.00", "2.00"]
