"""Bytes per parameter of number formats, as in the tables of docs/formats.md."""

from __future__ import annotations

import pytest

from moe_ckpt.state_format import StateFormat


def test_scales_of_earlier_passes_do_not_follow_from_masters() -> None:
    stored = StateFormat(
        compute="fp8",
        master="fp32",
        exp_avg="fp32",
        exp_avg_sq="fp32",
        has_history=True,
    )
    assert (stored.compute_bytes, stored.state_bytes, stored.full_bytes) == (1, 12, 13)


def format_of(row: str) -> StateFormat:
    compute, master, exp_avg, exp_avg_sq = row.replace("+", "/").lower().split("/")
    return StateFormat(
        compute=compute, master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq
    )


@pytest.mark.parametrize(
    ("row", "sizes"),
    [
        ("FP16/FP16/FP16+FP16", (2, 6, 8)),
        ("FP8/FP32/FP32+FP32", (1, 12, 12)),
        ("FP8/FP16/FP32+FP32", (1, 10, 11)),
        ("FP8/FP16/FP8+FP16", (1, 5, 6)),
        ("FP8/FP8/FP8+FP16", (1, 4, 4)),
        ("BF16/FP32/FP32+FP32", (2, 12, 12)),
        ("BF16/REMAINDER/FP32+FP32", (2, 10, 12)),
        ("BF16/REMAINDER/FP8+FP16", (2, 5, 7)),
    ],
)
def test_a_full_part_has_compute_weights_unless_masters_give_them(
    row: str, sizes: tuple[int, int, int]
) -> None:
    """`sizes`: bytes of compute weights, of the paper's state, and of a full part."""
    stored = format_of(row)
    assert str(stored) == row
    assert (stored.compute_bytes, stored.state_bytes, stored.full_bytes) == sizes
