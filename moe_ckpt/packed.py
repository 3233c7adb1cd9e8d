"""Compact stage tables, for the exchange at the start of a generation.

The size grows with the kinds of stages, not with ranks. Owns: the format of operators
and columns of numbers, compressed, without pickle. Must not: communicate.

Neighbouring operators are alike, and so are the ranks that own them. The format stores
the indices where a number differs from that of the operator before, and the difference.

    LZMA(
        number of operators, columns, changes
        | kind, layer, expert, MTP depth of each
        | indices of the changes
        | changes
    ), all int64
"""

from __future__ import annotations

import lzma
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import OperatorId, OperatorKind

IntArray = npt.NDArray[np.int64]
"""Array of int64."""

_KINDS = tuple(OperatorKind)
_NONE = -1


def pack_rows(operators: Sequence[OperatorId], columns: IntArray) -> bytes:
    """Pack operators and their columns of numbers, int64 [columns, operators]."""
    changes = np.diff(columns.T, axis=0, prepend=0).ravel()
    indices = np.flatnonzero(changes)
    ids = np.diff(_ids(operators), axis=0, prepend=0)
    head = np.array([len(operators), len(columns), len(indices)], np.int64)
    steps = np.diff(indices, prepend=0)
    content = np.concatenate([head, ids.ravel(), steps, changes[indices]]).astype(
        np.int64
    )
    # FORMAT_ALONE: these tables take a few hundred bytes, and .xz would add headers, an
    # index and a checksum
    return lzma.compress(content.tobytes(), lzma.FORMAT_ALONE, preset=1)


def unpack_rows(packed: bytes) -> tuple[tuple[OperatorId, ...], IntArray]:
    """Return the operators and columns that `pack_rows` packed."""
    content = np.frombuffer(lzma.decompress(packed), np.int64)
    num_operators, num_columns, num_changes = content[:3].tolist()
    ids, steps, values = np.split(
        content[3:], [4 * num_operators, 4 * num_operators + num_changes]
    )
    changes = np.zeros(num_operators * num_columns, np.int64)
    changes[np.cumsum(steps)] = values
    rows = changes.reshape(num_operators, num_columns)
    # in place: the columns of a thousand ranks and as many operators take 25 MB
    np.cumsum(rows, axis=0, out=rows)
    return _operators(np.cumsum(ids.reshape(-1, 4), axis=0)), rows.T


def shifted(operators: Sequence[OperatorId], layers: int) -> tuple[OperatorId, ...]:
    """Return operators with `layers` added to the number of each layer.

    Layers of MTP modules keep their numbers.
    """
    ids = _ids(operators)
    ids[(ids[:, 1] != _NONE) & (ids[:, 3] == _NONE), 1] += layers
    return _operators(ids)


def first_layer(operators: Sequence[OperatorId]) -> int:
    """Return the lowest layer among operators; 0 if there is none."""
    layers = [
        each.layer
        for each in operators
        if each.layer is not None and each.mtp_depth is None
    ]
    return min(layers, default=0)


def _ids(operators: Sequence[OperatorId]) -> IntArray:
    numbers = [
        (
            _KINDS.index(each.kind),
            _number(each.layer),
            _number(each.expert),
            _number(each.mtp_depth),
        )
        for each in operators
    ]
    return np.array(numbers, np.int64).reshape(-1, 4)


def _operators(ids: IntArray) -> tuple[OperatorId, ...]:
    return tuple(map(_operator, ids.tolist()))


def _number(value: int | None) -> int:
    return _NONE if value is None else value


def _operator(ids: Sequence[int]) -> OperatorId:
    kind, *others = ids
    layer, expert, mtp_depth = (
        None if number == _NONE else number for number in others
    )
    return OperatorId(
        kind=_KINDS[kind], layer=layer, expert=expert, mtp_depth=mtp_depth
    )
