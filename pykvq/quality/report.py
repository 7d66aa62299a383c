"""Reports of a comparison as tables."""

from __future__ import annotations

from typing import Any

_MIB = 1024 * 1024
_COLUMNS = ("KV format", "bits", "KV MiB", "KLD mean", "±", "median", "99 %", "99.9 %", "same top", "PPL", "PPL change")


def format_table(report: dict[str, Any]) -> str:
    """The figures of a report as a table in Markdown, with a line about how they were made."""
    settings = report["settings"]
    weights = "weights decoded to F32" if settings["float_weights"] else "weights as they are"
    head = (
        f"{report['model']}: {settings['n_chunks']} chunks of {settings['n_ctx']} tokens, {settings['n_compared']} "
        f"compared, {weights}; KLD in nats against F16"
    )
    rows = [_cells(row) for row in report["presets"]]
    return head + "\n\n" + _table(_COLUMNS, rows)


def format_needles(rows: list[dict[str, Any]]) -> str:
    """The figures of ``needle`` as a table in Markdown."""
    depths = list(rows[0]["by_depth"])
    columns = ("KV format", "tokens", *(f"depth {depth}" for depth in depths), "same greedy tokens")
    return _table(
        columns,
        [
            [
                row["name"],
                str(row["length"]),
                *("found" if row["by_depth"][depth] else "-" for depth in depths),
                f"{row['greedy_tokens']:.0f}",
            ]
            for row in rows
        ],
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['bits_per_element']:.2f}",
        f"{row['kv_bytes'] / _MIB:.1f}",
        f"{row['kld_mean']:.5f}",
        f"{row['kld_sem']:.5f}",
        f"{row['kld_median']:.5f}",
        f"{row['kld_p99']:.4f}",
        f"{row['kld_p999']:.4f}",
        f"{100 * row['same_top']:.2f} %",
        f"{row['ppl']:.3f}",
        f"{100 * row['ppl_change']:+.2f} ± {100 * row['ppl_change_error']:.2f} %",
    ]


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
