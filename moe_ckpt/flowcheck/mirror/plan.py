"""Positions of an iteration's gradients in the traffic of a mirror port.

A rank sends these positions with the update of an iteration. By the positions a
checkpoint server finds, in mirrored frames, the gradients that the rank does not send.
Owns: the positions as values, and their JSON form. Must not: hold gradients, or depend
on Megatron or torch. FlowCheck, sections 4 and 6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MirroredSums:
    """All-reduces of one group in one iteration."""

    group: str
    """Name of the group in hex, as in the mark that begins its stream (`marks.py`)."""

    size: int
    """Number of ranks in the group."""

    buckets: tuple[int, ...]
    """Bytes of each bucket, in the order of reduction."""

    dtype: str
    """Dtype of the elements, a key of ELEMENT_BYTES."""

    first: int
    """Number of the first operation of the group that can be one of the all-reduces.
    Other operations may lie between `first` and `end`.
    """

    end: int
    """Number of the first operation of the group after the all-reduces."""

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES or len(bytes.fromhex(self.group)) != 16:
            raise ValueError(f"got group {self.group!r} of {self.dtype!r}")
        if (
            self.size < 2
            or not self.buckets
            or min(self.buckets) < 1
            or not 0 <= self.first <= self.end
        ):
            raise ValueError(f"got {self}")

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketOffset:
    """Offset of a gradient in the buckets of the groups."""

    group: int
    """Index of the group in `Mirrored.groups`."""

    bucket: int
    """Index of the bucket in `MirroredSums.buckets`."""

    start: int
    """Index of the gradient's first element in the bucket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """Positions of the gradients of an update that servers capture."""

    groups: tuple[MirroredSums, ...]
    """All-reduces of each group."""

    offsets: tuple[BucketOffset, ...]
    """Offset of each captured gradient, in the order in which the header of the state's
    snapshot lists the parts that take a step.
    """

    def to_json(self) -> Any:
        """Return a value of JSON, which `from_json` reads."""
        offsets = [[each.group, each.bucket, each.start] for each in self.offsets]
        return {"groups": [asdict(each) for each in self.groups], "places": offsets}

    @classmethod
    def from_json(cls, value: Any) -> Mirrored:
        """Return the value that `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: The value is any other one.
        """
        groups = tuple(_sums(each) for each in value["groups"])
        offsets = tuple(_offset(each, groups) for each in value["places"])
        return cls(groups=groups, offsets=offsets)


def _sums(value: Mapping[str, Any]) -> MirroredSums:
    return MirroredSums(**{**value, "buckets": tuple(map(int, value["buckets"]))})


def _offset(value: Any, groups: tuple[MirroredSums, ...]) -> BucketOffset:
    group, bucket, start = map(int, value)
    if not (
        0 <= group < len(groups)
        and 0 <= bucket < len(groups[group].buckets)
        and start >= 0
    ):
        raise ValueError(f"got place {value}")
    return BucketOffset(group=group, bucket=bucket, start=start)
