"""Number formats of a parameter's training state, and the bytes that they take. Pure.

A format names how four numbers of each parameter are stored: the weight that forward
computes with, the master weight that the optimizer updates, and Adam's two moments.
MoEvement, Table 7, writes a row as compute / master / moments.
"""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "remainder": 2, "fp8": 1}
"""Bytes of an element. `remainder`: the 16 low bits of an FP32 master whose high bits
are the BF16 compute weight.
"""

MASTER_FORMATS = ("fp32", "fp16", "remainder", "fp8")
FP8_RECIPES = ("tensorwise", "blockwise", "delayed")
MOMENT_FORMATS = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """How a parameter's compute weight, master weight and moments are stored; FP8 and
    FP16 states have FP32 scales.

    `has_history`: the scales of compute weights are taken from earlier passes (delayed
    scaling).
    """

    compute: str
    master: str
    exp_avg: str
    exp_avg_sq: str
    has_history: bool = False

    @property
    def compute_bytes(self) -> int:
        """Bytes of a parameter of an operator that a snapshot takes for forward passes
        only.
        """
        return BYTES[self.compute]

    @property
    def state_bytes(self) -> int:
        """Bytes of a parameter's master weight and moments, as the paper counts a full
        snapshot.
        """
        return BYTES[self.master] + BYTES[self.exp_avg] + BYTES[self.exp_avg_sq]

    @property
    def full_bytes(self) -> int:
        """Bytes of a parameter of an operator that a snapshot takes in full, without
        scales.
        """
        return self.state_bytes + (0 if self.derives_compute else self.compute_bytes)

    @property
    def derives_compute(self) -> bool:
        """Whether the compute weight is the rounding of the stored master weight.

        An FP16 master is itself rounded, from the value that the compute weight was
        rounded from; a remainder is no value without the compute weight. An FP8 master
        is the reference optimizer's own, which rounds the stored one. FP8 parameters
        with delayed scaling are rounded with scales that do not follow from the master.
        """
        return self.master in ("fp32", "fp8") and not self.has_history

    @property
    def is_plain(self) -> bool:
        """Whether torch's Adam holds this state: FP32 masters and moments."""
        return (self.master, self.exp_avg, self.exp_avg_sq) == ("fp32", "fp32", "fp32")

    def __str__(self) -> str:
        return f"{self.compute}/{self.master}/{self.exp_avg}+{self.exp_avg_sq}".upper()
