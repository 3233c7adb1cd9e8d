"""The thread of a checkpoint server that reads a mirror port and captures gradients.

Owns: the thread, and waits for frames that are still in transit. Must not: interpret
frames (`mirror.watcher` does).

    thread            read -> see, see, ... -> merge
                      no frame for 20 ms: missing bytes are lost
    any other thread  sums(iteration): complete by now, or complete soon, or lost

Frames are parsed and concatenated as they come (FlowCheck, section 6.1). The optimizer
cannot follow at once. Ranks clip by the norm of all gradients, which they reduce after
the last gradient, and only then decide whether to step at all.

    ranks    reduce i ... norm, step, facts of i -> servers   reduce i + 1 ...
    thread   parse, merge i                                   parse, merge i + 1
    updater                           facts of i: sums(i) -> Adam of i ...... state i

So two iterations are in memory: the sums of i leave the watcher as a whole, and Adam
takes these sums without the lock of the capture, while the thread captures i + 1.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from threading import Condition, Thread

from moe_ckpt.errors import CheckpointLoadError
from moe_ckpt.flowcheck.mirror.plan import MirroredSums
from moe_ckpt.flowcheck.mirror.port import FrameSource
from moe_ckpt.flowcheck.mirror.watcher import Watcher

_QUIET_S = 0.02
_MOST_GROUPS = 64

_log = logging.getLogger(__name__)


class MirrorCapture:
    """Sums that a server captures, for any thread.

    When a caller asks for sums, the training ranks have received all of them. Bytes
    that the port does not deliver within `wait_s` from then on are therefore lost. The
    results of a group's last iterations stay, for the other ranks of the group's ring
    that this server watches.
    """

    def __init__(
        self,
        port: FrameSource,
        watcher: Watcher,
        *,
        keep_iters: int,
        wait_s: float = 2.0,
    ) -> None:
        """Start the thread, which reads the port until `close`.

        Args:
            port: Source of the frames.
            watcher: Assembles the sums.
            keep_iters: Number of iterations per group whose results stay.
            wait_s: Seconds to wait for bytes that are still in transit.
        """
        self._port = port
        self._watcher = watcher
        self._keep_iters = keep_iters
        self._wait_s = wait_s
        self._changed = Condition()
        self._results: OrderedDict[str, OrderedDict[int, list[bytearray] | None]] = (
            OrderedDict()
        )
        """Results by group, then by `end` of the iteration; None: incomplete."""
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = Thread(target=self._read_all, name="mirror-capture", daemon=True)
        self._thread.start()

    def sums(self, wanted: MirroredSums) -> list[bytearray]:
        """Return the results of an iteration's all-reduces.

        Returns:
            Bytes of each bucket, in order.

        Raises:
            CheckpointLoadError: Bytes of the results are lost.
        """
        with self._changed:
            found = self._await(wanted)
            if found is None:
                raise CheckpointLoadError(self._reason(wanted))
            return found

    def close(self) -> None:
        """End the thread, and close the port."""
        self._is_closed = True
        self._thread.join()
        self._port.close()

    def _await(self, wanted: MirroredSums) -> list[bytearray] | None:
        results = self._results.setdefault(wanted.group, OrderedDict())
        until_s = time.monotonic() + self._wait_s
        while wanted.end not in results:  # another thread may wait for the same
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                self._watcher.flush()
            found = self._watcher.sums(wanted)
            if found is not None or left_s <= 0 or self._failure:
                self._keep(wanted, found)
                return found
            self._changed.wait(left_s)
        return results[wanted.end]

    def _keep(self, wanted: MirroredSums, found: list[bytearray] | None) -> None:
        # anew: other threads may have dropped the group while this one waited
        results = self._results.setdefault(wanted.group, OrderedDict())
        # a failure stays too: the other ranks of the ring must get the same answer
        results[wanted.end] = found
        self._results.move_to_end(wanted.group)
        self._watcher.drop(wanted)
        while len(results) > self._keep_iters:
            results.popitem(last=False)
        while len(self._results) > _MOST_GROUPS:
            self._results.popitem(last=False)

    def _reason(self, wanted: MirroredSums) -> str:
        if self._failure:
            return f"the mirror port: {self._failure!r}"
        if not self._watcher.knows(wanted.group):
            got = (
                f"{self._watcher.num_frames} segments and none of this group of"
                f" {wanted.size} ranks"
            )
            return (
                f"ckpt.mirror_interface: got {got}, wanted a mirror port of their"
                " switch, and gloo over TCP"
            )
        return (
            f"got an incomplete capture of {sum(wanted.buckets)} bytes of gradients,"
            " wanted all of them"
        )

    def _read_all(self) -> None:
        try:
            while not self._is_closed:
                frames = self._port.read(_QUIET_S)
                with self._changed:
                    for frame in frames:
                        self._watcher.see(frame)
                    self._watcher.merge()
                    if not frames:
                        self._watcher.flush()
                        self._watcher.limit()
                    self._changed.notify_all()
        except Exception as error:  # top of a thread: later requests raise the error
            _log.exception("the mirror port is not read any more")
            with self._changed:
                self._failure = error
                self._changed.notify_all()
