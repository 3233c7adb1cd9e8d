"""A rank's micro-batches from an iterator without random access, kept in host memory.

Kept micro-batches let the rank go back to an earlier position.

Owns: the micro-batches since the oldest iteration to which a recovery may lead back,
and the position among all micro-batches. The position is part of an iteration's start,
as generators are: step logs, copies on peers and checkpoints hold the position. A new
process continues from a mark, which is the loader's own state one iteration earlier, or
from the beginning. The process reads up to the position, and compares the checksum with
the checksum of the earlier process. Must not: communicate, or write files.

    micro-batch    0 .. 3 | 4  5 | 6  7 | 8  9 |          read so far: 10, kept: 4 to 9
                            mark   position of a start
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from moe_ckpt.config import require

SETTING = "run.keep_batches_bytes"
_NUMBERS, _BEGAN, _STATE = "numbers", "began", "state"
_TENSOR, _TUPLE = "__tensor__", "__tuple__"
_NOT_AGAIN = (
    "the same micro-batches again in a new process: an iterator whose order is fixed,"
    " or one with state_dict"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """A position from which a new loader can continue."""

    position: int = 0
    """The number of micro-batches before the mark."""

    checksum: int = 0
    """The checksum of the micro-batches before the mark."""

    state: Any = None
    """The loader's own state at the mark; None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One kept micro-batch."""

    batch: Any
    """A copy of the micro-batch."""

    checksum: int
    """The checksum of all micro-batches up to and including this one."""

    generators: Sequence[Any] | None
    """The process's generators after the read; None if the read did not move them."""

    size_bytes: int
    """The bytes of the tensors."""


class KeptBatches:
    """Iterates over the micro-batches of a loader, and can go back.

    The iterator is for one thread. In a new process a loader with `state_dict` and
    `load_state_dict` continues from its state. Any other loader is read from the
    beginning, and has to give the same micro-batches again.

    Args:
        loader: An iterator over nests of tensors in host memory.
        limit_bytes: The most bytes of kept micro-batches.
        moves_generators: Whether a read may move the process's generators. If not, a
            read leaves the generators as they were.

    Example:
        data = KeptBatches(iter(loader), limit_bytes=1 << 30)
        state = TrainingState(
            model=model, optimizer=optimizer, scheduler=scheduler, data=data
        )
        ...
        data.iteration_started(iteration, keep_since=session.oldest_start)
        batch = next(data)  # in each forward step
    """

    def __init__(
        self, loader: Any, *, limit_bytes: int, moves_generators: bool = True
    ) -> None:
        self.position = 0
        self._moves_generators = moves_generators
        self._loader = loader
        self._has_state = has_state(loader)
        self._limit_bytes = limit_bytes
        self._head = self._checksum = 0  # of all that was read
        self._kept: dict[int, _Kept] = {}
        self._marks = [_Mark(state=self._state())]
        self._began: dict[int, int] = {}  # position of each iteration's start
        self._restored: tuple[int, int, _Mark] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next micro-batch, as the loader gave it; the caller may change it.

        Raises:
            ConfigError: The micro-batches that a recovery needs exceed the limit, or
                the loader does not give the same micro-batches again. The error names
                the setting.
        """
        if self.position != self._head and self.position not in self._kept:
            self._catch_up()
        kept = self._kept.get(self.position)
        if kept is None:
            # evaluations read after the start of the next iteration has been saved, so
            # a recovery would not repeat draws of such a read
            with (
                contextlib.nullcontext()
                if self._moves_generators
                else _generators_kept()
            ):
                batch = self._read()
            self._make_room()
        else:
            batch = _copied(kept.batch)
            if kept.generators is not None:
                _set_generators(kept.generators)
        self.position += 1
        return batch

    @property
    def kept_bytes(self) -> int:
        """The bytes of all kept micro-batches."""
        return sum(kept.size_bytes for kept in self._kept.values())

    def bytes_since(self, iteration: int) -> int:
        """Return the bytes of the kept micro-batches since an iteration's start."""
        return sum(
            kept.size_bytes
            for position, kept in self._kept.items()
            if position >= self._began[iteration]
        )

    def iteration_started(self, iteration: int, *, keep_since: int | None) -> None:
        """Remember the position as the start of an iteration, and set a mark.

        Args:
            iteration: The iteration that starts.
            keep_since: The oldest iteration to which a recovery may lead back. Earlier
                micro-batches are dropped; None: all stay.
        """
        if keep_since is not None:
            self._keep_since(keep_since)
        self._began[iteration] = self.position
        if self._has_state and self.position == self._head > self._marks[-1].position:
            self._marks.append(
                _Mark(position=self._head, checksum=self._checksum, state=self._state())
            )

    def go_to(self, position: int) -> None:
        """Continue with a micro-batch, without a check of the micro-batches before it.

        Args:
            position: The number of the micro-batch, from 0.
        """
        self.position, self._restored = position, None

    def saved(self) -> dict[str, torch.Tensor]:
        """Return the position, and the data with which a new process gets there.

        Raises:
            ConfigError: The loader's state has a value that cannot be stored.
        """
        checksum, mark = self._checksum_here(), self._mark_here()
        numbers = torch.tensor([self.position, checksum, mark.position, mark.checksum])
        began = torch.tensor(sorted(self._began.items()), dtype=torch.int64).view(-1, 2)
        return {_NUMBERS: numbers, _BEGAN: began} | (
            {} if mark.state is None else _packed(mark.state)
        )

    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Go to the position of a result of `saved`, from this or an earlier process.

        Reads follow when the next micro-batch is requested.

        Raises:
            ConfigError: This process has read up to the position, but other
                micro-batches than before.
        """
        position, checksum, *marked = saved[_NUMBERS].tolist()
        state = _unpacked(saved) if _STATE in saved else None
        mark = _Mark(position=marked[0], checksum=marked[1], state=state)
        self._began = dict(saved[_BEGAN].tolist()) | self._began
        self.position, self._restored = position, (position, checksum, mark)
        if position == self._head:
            require(
                checksum == self._checksum,
                "data loader",
                "other micro-batches than before",
                _NOT_AGAIN,
            )

    def _keep_since(self, iteration: int) -> None:
        # replays do not record starts, so the newest recorded start up to `iteration`
        # counts
        known = max(
            (begun for begun in self._began if begun <= iteration), default=None
        )
        if known is None:
            return
        oldest = self._began[known]
        self._began = {
            begun: position for begun, position in self._began.items() if begun >= known
        }
        self._drop_before(oldest)
        earlier = [mark for mark in self._marks if mark.position < oldest]
        # keep one more mark: a new process that continues at the oldest start needs a
        # mark before that start
        self._marks = [
            *earlier[-1:],
            *(mark for mark in self._marks if mark.position >= oldest),
        ]

    def _state(self) -> Any:
        # a copy, because `state_dict` may return objects that later reads change
        return copy.deepcopy(self._loader.state_dict()) if self._has_state else None

    def _checksum_here(self) -> int:
        """Return the checksum of all micro-batches before the position."""
        if self.position == self._head:
            return self._checksum
        before = self._kept.get(self.position - 1)
        if before is None:
            assert self._restored is not None, self.position
            return self._restored[1]
        return before.checksum

    def _mark_here(self) -> _Mark:
        """Return a mark before the position."""
        # strictly before: opening a loader may draw from generators, and only reads up
        # to the position restore the generators
        earlier = [mark for mark in self._marks if mark.position < self.position]
        if (
            self._restored
            and self._restored[0] == self.position
            and self.position > self._head
        ):
            return self._restored[2]  # no read since
        return (
            earlier[-1]
            if earlier
            else self._restored[2]
            if self._restored
            else self._marks[0]
        )

    def _catch_up(self) -> None:
        """Read up to the position, from the newest mark that the loader can reach."""
        target, checksum, mark = self._restored or (self.position, None, _Mark())
        if self.position < self._head or (
            mark.state is not None and mark.position > self._head
        ):
            wanted = (
                f"more: micro-batch {self.position} was dropped, and the data loader"
                " has no state_dict"
            )
            require(
                mark.state is not None and self._has_state,
                SETTING,
                self._limit_bytes,
                wanted,
            )
            self._loader.load_state_dict(copy.deepcopy(mark.state))
            self._head, self._checksum, self._marks = (
                mark.position,
                mark.checksum,
                [mark],
            )
            self._drop_before(max(self._kept, default=0) + 1)
        # the restored generators include the draws of these reads already
        with _generators_kept():
            while self._head < self.position:
                self._read()
                self._make_room(may_drop=True)
        self._drop_before(min(self._began.values(), default=0))
        same = checksum is None or target != self.position or checksum == self._checksum
        require(same, "data loader", "other micro-batches than before", _NOT_AGAIN)

    def _read(self) -> Any:
        before = _generators()
        batch = next(self._loader)
        after = _generators()
        moved = self._moves_generators and not _are_equal(before, after)
        first = self._kept.get(self._head - 1)
        # The first read may draw to shuffle. If the second read draws as well, the
        # loader draws at each read
        at_each = (
            moved
            and self._head == 1
            and first is not None
            and first.generators is not None
        )
        wanted = (
            "a generator of its own: a new process cannot repeat draws from those of"
            " torch, NumPy and Python"
        )
        require(
            not at_each,
            "data loader",
            "draws from the process's generators at each read",
            wanted,
        )
        self._checksum, size_bytes = checked(batch, self._checksum)
        # a copy, because the pass may change the batch, and a replay reads the batch
        # again
        self._kept[self._head] = _Kept(
            batch=_copied(batch),
            checksum=self._checksum,
            generators=after if moved else None,
            size_bytes=size_bytes,
        )
        self._head += 1
        return batch

    def _make_room(self, *, may_drop: bool = False) -> None:
        """Drop the oldest micro-batches while the kept bytes exceed the limit.

        Raises ConfigError if the loader has no state from which to repeat the dropped
        micro-batches, unless `may_drop`.
        """
        while self.kept_bytes > self._limit_bytes:
            wanted = (
                f"at least {self.kept_bytes}, the bytes of micro-batches since the"
                " oldest snapshot"
            )
            require(self._has_state or may_drop, SETTING, self._limit_bytes, wanted)
            del self._kept[min(self._kept)]

    def _drop_before(self, end: int) -> None:
        self._kept = {
            position: kept for position, kept in self._kept.items() if position >= end
        }


def has_state(loader: Any) -> bool:
    """Return whether a loader can save its state for a new process."""
    return callable(getattr(loader, "state_dict", None)) and hasattr(
        loader, "load_state_dict"
    )


def _copied(batch: Any) -> Any:
    """Return a copy of a nest of dictionaries, lists, tuples and tensors."""
    if isinstance(batch, torch.Tensor):
        require(
            batch.device.type == "cpu",
            "data loader",
            f"a tensor on {batch.device}",
            "one in host memory",
        )
        return batch.clone()
    if isinstance(batch, dict):
        return {key: _copied(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        copied = [_copied(value) for value in batch]
        return copied if isinstance(batch, list) else tuple(copied)
    known = batch is None or isinstance(batch, str | int | float)
    require(
        known,
        "data loader",
        type(batch).__name__,
        "nests of dictionaries, lists and tuples of tensors",
    )
    return batch


def checked(batch: Any, checksum: int) -> tuple[int, int]:
    """Continue a checksum with a batch.

    Args:
        batch: A nest of dictionaries, lists, tuples and tensors.
        checksum: The checksum so far.

    Returns:
        The new checksum, and the bytes of the batch's tensors.
    """
    if isinstance(batch, torch.Tensor):
        content = batch.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        # type and shape, too, because the same bytes may be other numbers
        named = zlib.crc32(f"{batch.dtype}{tuple(batch.shape)}".encode(), checksum)
        return zlib.crc32(memoryview(cast("Any", content)), named), batch.nbytes
    if not isinstance(batch, dict | list | tuple):
        return zlib.crc32(repr(batch).encode(), checksum), 0
    total_bytes = 0
    for value in batch.values() if isinstance(batch, dict) else batch:
        checksum, size_bytes = checked(value, checksum)
        total_bytes += size_bytes
    return checksum, total_bytes


def _packed(state: Any) -> dict[str, torch.Tensor]:
    """Return a loader's state as tensors, which travel without pickling."""
    tensors: dict[str, torch.Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = f"{_STATE}.{len(tensors)}"
            tensors[name] = value.detach().cpu().clone()
            return {_TENSOR: name}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, tuple):
            return {_TUPLE: [plain(each) for each in value]}
        wanted = (
            "dictionaries with names for keys, lists, tuples, numbers, strings and"
            " tensors"
        )
        # exact types: NumPy's float64 is a float, and would come back as a Python float
        require(
            value is None or type(value) in (bool, int, float, str),
            "state_dict of the data loader",
            value,
            wanted,
        )
        return value

    text = json.dumps(plain(state)).encode()
    return {_STATE: torch.tensor(list(text), dtype=torch.uint8), **tensors}


def _unpacked(saved: Mapping[str, torch.Tensor]) -> Any:
    """Return the loader's state from a result of `_packed`."""

    def rebuilt(value: dict[str, Any]) -> Any:
        if set(value) == {_TENSOR}:
            return saved[value[_TENSOR]].clone()
        return tuple(value[_TUPLE]) if set(value) == {_TUPLE} else value

    return json.loads(saved[_STATE].numpy().tobytes(), object_hook=rebuilt)


def _generators() -> Sequence[Any]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_generators(states: Sequence[Any]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    of_numpy, others = cast("Any", first[1]), cast("Any", second[1])
    return (
        torch.equal(first[0], second[0])
        and first[2] == second[2]
        and np.array_equal(of_numpy[1], others[1])
        and of_numpy[2:] == others[2:]
    )


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    states = _generators()
    try:
        yield
    finally:
        _set_generators(states)
