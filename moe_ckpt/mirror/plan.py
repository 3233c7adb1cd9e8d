"""The part of an iteration's gradients that a checkpoint server takes from mirrored
frames. Values and their JSON form.

Owns: the place of each parameter's gradient in the buckets that a group reduces. Must
not: know Megatron or torch. FlowCheck, sections 4 and 6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class MirroredSums:
    """The all-reduces of one group in one iteration: `buckets` of bytes, in order, each
    of elements of `dtype`.

    `group` is the mark's group, in hex, and `size` its ranks. The operations are those
    from number `first` to before `end` of the group, among which others may be.
    """

    group: str
    size: int
    buckets: tuple[int, ...]
    dtype: str
    first: int
    end: int

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
class BucketPlace:
    """The place of a gradient: the number of the group in `Mirrored`, of its bucket,
    and of the first element there.
    """

    group: int
    bucket: int
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """The gradients that servers capture. `places`: for each master weight that takes a
    step, in the header's order; None for one whose gradient is tapped.
    """

    groups: tuple[MirroredSums, ...]
    places: tuple[BucketPlace | None, ...]


def mirrored_to_json(mirrored: Mirrored | None) -> Any:
    """Return a value that `mirrored_from_json` reads."""
    if mirrored is None:
        return None
    places = [
        place and [place.group, place.bucket, place.start] for place in mirrored.places
    ]
    return {"groups": [asdict(each) for each in mirrored.groups], "places": places}


def mirrored_from_json(value: Any) -> Mirrored | None:
    """Return the value that `mirrored_to_json` wrote. Raises ValueError, TypeError or
    KeyError for any other.
    """
    if value is None:
        return None
    groups = tuple(_sums(each) for each in value["groups"])
    places = tuple(
        None if place is None else _place(place, groups) for place in value["places"]
    )
    return Mirrored(groups=groups, places=places)


def _sums(value: Mapping[str, Any]) -> MirroredSums:
    return MirroredSums(**{**value, "buckets": tuple(map(int, value["buckets"]))})


def _place(value: Any, groups: tuple[MirroredSums, ...]) -> BucketPlace:
    group, bucket, start = map(int, value)
    if not (
        0 <= group < len(groups)
        and 0 <= bucket < len(groups[group].buckets)
        and start >= 0
    ):
        raise ValueError(f"got place {value}")
    return BucketPlace(group=group, bucket=bucket, start=start)
