"""Number formats of a parameter's training state, and their sizes in bytes. Pure.

A format names how four numbers of each parameter are stored: the weight that forward
computes with, the master weight that the optimizer updates, and Adam's two moments.
MoEvement, Table 7, writes a row as compute / master / moments.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "remainder": 2, "fp8": 1}
"""Bytes of an element, by the name of the format.

`remainder`: the 16 low bits of an FP32 master whose high bits are the BF16 compute
weight.
"""

MASTER_FORMATS = ("fp32", "fp16", "remainder", "fp8")
"""Formats of master weights."""

DERIVING_MASTERS = ("fp32", "fp8")
"""Formats of master weights from which the compute weight follows, by rounding.

fp32: the optimizer rounds the stored master. fp8: so does the reference optimizer on a
CPU, the only one that stores such masters. Not fp16: the optimizer rounds stored master
and compute weight from one FP32 value, which is not stored. Not remainder: a remainder
is no value without the compute weight.
"""

FP8_RECIPES = ("tensorwise", "blockwise", "delayed")
"""Recipes for the scales of FP8 tensors."""

MOMENT_FORMATS = ("fp32", "bf16", "fp16", "fp8")
"""Formats of Adam's moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """Formats of a parameter's compute weight, master weight and moments.

    Master weights and moments in FP8 or FP16 have FP32 scales, and so have compute
    weights in FP8.
    """

    compute: str
    """Format of the compute weight."""

    master: str
    """Format of the master weight, one of `MASTER_FORMATS`."""

    exp_avg: str
    """Format of Adam's first moment, one of `MOMENT_FORMATS`."""

    exp_avg_sq: str
    """Format of Adam's second moment, one of `MOMENT_FORMATS`."""

    has_history: bool = False
    """Whether the scales of compute weights come from earlier passes (delayed scaling).
    """

    @property
    def compute_bytes(self) -> int:
        """Bytes per parameter of an operator that is taken for forward passes only."""
        return BYTES[self.compute]

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter of master weight and moments.

        The paper counts a full snapshot in this way.
        """
        return BYTES[self.master] + BYTES[self.exp_avg] + BYTES[self.exp_avg_sq]

    @property
    def full_bytes(self) -> int:
        """Bytes per parameter of an operator that is taken in full, without scales."""
        return self.state_bytes + (0 if self.derives_compute else self.compute_bytes)

    @property
    def derives_compute(self) -> bool:
        """Whether the compute weight is the rounding of the stored master weight.

        FP8 parameters with delayed scaling are rounded with scales that do not follow
        from the master.
        """
        return self.master in DERIVING_MASTERS and not self.has_history

    @property
    def is_plain(self) -> bool:
        """Whether torch's Adam holds this state: FP32 masters and moments."""
        return (self.master, self.exp_avg, self.exp_avg_sq) == ("fp32", "fp32", "fp32")

    def __str__(self) -> str:
        return f"{self.compute}/{self.master}/{self.exp_avg}+{self.exp_avg_sq}".upper()
