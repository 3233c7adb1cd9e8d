"""The status page that a worker shares with its supervisor.

The page is a file of 4 KiB in shared memory, written without system calls. Owns: the
offset of each number. The worker writes its phase. The supervisor reads the page, and
detects a hang. A fault injector writes an order, which the worker executes on itself at
the named point: a real signal, at an exact moment. Every number is eight aligned bytes,
which are read and written whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path

from moe_ckpt.private_files import open_private
from moe_ckpt.reserved_file import reserve
from moe_ckpt.types import Phase

_SIZE_BYTES = 4096
_BEAT_EVERY_S = 0.05
ANY_ITERATION = -1


class _Word(IntEnum):
    HEARTBEAT_NS = 0
    PROGRESS_NS = 1
    WAITING = 2
    GENERATION = 3
    ITERATION = 4
    PHASE = 5
    ORDER_SIGNAL = 6  # 0: no order
    ORDER_ITERATION = 7
    ORDER_PHASE = 8
    ORDER_SKIP = 9
    ORDERS_OBEYED = 10
    # separate from WAITING: the thread that polls the device writes this word at any
    # time
    DEVICE_WAITS = 11
    # separate from WAITING, too: collectives inside a save clear WAITING
    SAVING = 12


RAISE_NUMBER = signal.SIGURG
"""The number in an order to raise an exception. No process is sent this signal."""


class InjectedError(RuntimeError):
    """An exception such as a sick GPU raises, raised on an order."""


class _Waiting(IntEnum):
    NO = 0
    FOR_RANKS = 1
    FOR_COPIES = 2


def signal_this_process(number: int) -> None:
    """Send this process a signal, or raise the exception of a sick GPU.

    Args:
        number: The signal; RAISE_NUMBER: raise the exception.

    Raises:
        InjectedError: The number is RAISE_NUMBER.
    """
    if number == RAISE_NUMBER:
        raise InjectedError(
            "CUDA error: uncorrectable ECC error encountered (injected)"
        )
    os.kill(os.getpid(), number)


class StatusPage:
    """One worker's status page.

    Times are `time.monotonic_ns()`, which all processes of a machine share.
    """

    def __init__(
        self, path: Path, *, execute: Callable[[int], None] = signal_this_process
    ) -> None:
        """Open a page. The file is created if it is missing.

        Args:
            path: The file.
            execute: Carries an order out; receives the number of the order's signal.

        Raises:
            ConfigError: The shared memory has no room for the page.
        """
        self._execute = execute
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            # without the reservation, a later write to the page could end the process
            # by SIGBUS
            reserve(fd, path, _SIZE_BYTES)
            self._words = memoryview(mmap.mmap(fd, _SIZE_BYTES)).cast("q")
        finally:
            os.close(fd)

    @property
    def heartbeat_s(self) -> float:
        """Time of the worker's last sign of life, in seconds."""
        return self._words[_Word.HEARTBEAT_NS] / 1e9

    @property
    def progress_s(self) -> float:
        """Time of the training thread's last progress, in seconds.

        The thread makes progress as it enters a phase, and as it begins or ends to
        communicate.
        """
        return self._words[_Word.PROGRESS_NS] / 1e9

    @property
    def waiting(self) -> bool:
        """Whether the worker waits for ranks, daemons or storage.

        Either the training thread waits or its device does. Such a worker is not hung.
        """
        words = self._words
        return words[_Word.WAITING] != _Waiting.NO or bool(
            words[_Word.DEVICE_WAITS] or words[_Word.SAVING]
        )

    @property
    def communicates(self) -> bool:
        """Whether the training thread waits for other ranks."""
        return self._words[_Word.WAITING] == _Waiting.FOR_RANKS

    @property
    def generation(self) -> int:
        return self._words[_Word.GENERATION]

    @property
    def iteration(self) -> int:
        return self._words[_Word.ITERATION]

    @property
    def phase(self) -> Phase:
        return Phase(self._words[_Word.PHASE])

    def reset(self) -> None:
        """Reset the page for a process that is about to start.

        An order for the dead process is void.
        """
        for word in _Word:
            if word is not _Word.ORDERS_OBEYED:
                self._words[word] = 0
        # a time of 0 would be a silence since the start of the machine, and the
        # supervisor would kill the new process at once
        self.beat()
        self._words[_Word.PROGRESS_NS] = time.monotonic_ns()

    def beat(self) -> None:
        """Write a sign of life."""
        self._words[_Word.HEARTBEAT_NS] = time.monotonic_ns()

    def wait(self, waiting: bool) -> None:
        """Record that the training thread begins or ends to wait for other ranks.

        Args:
            waiting: Whether the wait begins.
        """
        self._wait(_Waiting.FOR_RANKS if waiting else _Waiting.NO)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Record that the training thread waits for other ranks inside the block.

        After the block, the record from before the block holds again.
        """
        before = _Waiting(self._words[_Word.WAITING])
        self._wait(_Waiting.FOR_RANKS)
        try:
            yield
        finally:
            self._wait(before)

    def wait_on_device(self, waiting: bool) -> None:
        """Record that the device begins or ends to wait for other ranks.

        The host may block for the device anywhere.

        Args:
            waiting: Whether the wait begins.
        """
        # first: from here on the host may compute for as long
        self._words[_Word.PROGRESS_NS] = time.monotonic_ns()
        self._words[_Word.DEVICE_WAITS] = waiting

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Record that the training thread writes a checkpoint inside the block.

        The block counts as a wait, however slow the storage is.
        """
        self._words[_Word.SAVING] = True
        try:
            yield
        finally:
            self._words[_Word.PROGRESS_NS] = time.monotonic_ns()  # first, as in `_wait`
            self._words[_Word.SAVING] = False

    def wait_for_copies(self, waiting: bool) -> None:
        """Record that the training thread begins or ends to wait for daemons.

        Args:
            waiting: Whether the wait begins. The daemons are the rank's own or other
                ranks'.
        """
        self._wait(_Waiting.FOR_COPIES if waiting else _Waiting.NO)

    def join(self, generation: int) -> None:
        """Record that the worker is about to join a generation."""
        self._words[_Word.GENERATION] = generation
        self.enter(Phase.JOIN)

    def begin_at(self, iteration: int) -> None:
        """Record that all ranks continue from the state after an iteration.

        An error before the next iteration counts for this iteration.
        """
        self._words[_Word.ITERATION] = iteration

    def enter(self, phase: Phase, iteration: int | None = None) -> None:
        """Record the beginning of a phase, and obey an order for this point.

        Args:
            phase: The phase.
            iteration: The iteration of the phase; None: the iteration does not change.
        """
        self._words[_Word.PROGRESS_NS] = time.monotonic_ns()
        if iteration is not None:
            self._words[_Word.ITERATION] = iteration
        self._words[_Word.PHASE] = phase
        if self._words[_Word.ORDER_SIGNAL]:
            self._obey()

    def enter_in_iteration(self, phase: Phase) -> None:
        """Record the beginning of a phase, unless a recovery repeats the phase.

        All phases that a recovery repeats count as recovery.
        """
        self.enter(Phase.RECOVERY if self.phase is Phase.RECOVERY else phase)

    def order(
        self,
        number: signal.Signals,
        phase: Phase,
        *,
        iteration: int = ANY_ITERATION,
        skip: int = 0,
    ) -> None:
        """Order the worker to send itself a signal as it enters a phase.

        Args:
            number: The signal.
            phase: The phase.
            iteration: The iteration of the phase.
            skip: How many times the worker enters the phase before the order counts.
        """
        self._words[_Word.ORDER_ITERATION] = iteration
        self._words[_Word.ORDER_PHASE] = phase
        self._words[_Word.ORDER_SKIP] = skip
        self._words[_Word.ORDER_SIGNAL] = number  # last: from now on the order counts

    @property
    def has_order(self) -> bool:
        """Whether an order is pending."""
        return bool(self._words[_Word.ORDER_SIGNAL])

    @property
    def orders_obeyed(self) -> int:
        """Number of executed orders, over all incarnations.

        The number separates an executed order from a void order.
        """
        return self._words[_Word.ORDERS_OBEYED]

    def _wait(self, waiting: _Waiting) -> None:
        # first: at the end of a long wait the old time would count as a hang
        self._words[_Word.PROGRESS_NS] = time.monotonic_ns()
        self._words[_Word.WAITING] = waiting

    def _obey(self) -> None:
        words = self._words
        wanted = words[_Word.ORDER_ITERATION]
        if words[_Word.ORDER_PHASE] != words[_Word.PHASE] or wanted not in (
            ANY_ITERATION,
            words[_Word.ITERATION],
        ):
            return
        if words[_Word.ORDER_SKIP] > 0:
            words[_Word.ORDER_SKIP] -= 1
            return
        # before the execution: a process that dies of an order could not mark the order
        # as done
        number, words[_Word.ORDER_SIGNAL] = words[_Word.ORDER_SIGNAL], 0
        words[_Word.ORDERS_OBEYED] += 1
        self._execute(number)


def start_heartbeat(page: StatusPage) -> None:
    """Start to write signs of life, for as long as the process lives."""
    threading.Thread(
        target=_beat, args=(page, threading.Event()), name="heartbeat", daemon=True
    ).start()


def _beat(page: StatusPage, never: threading.Event) -> None:
    while not never.wait(_BEAT_EVERY_S):
        page.beat()
