"""Which machines of a job are lost, as seen from another machine.

A machine is lost

- at once, if a connection to it has ended, and the next attempt is refused: no process
  listens there any more, so the machine's processes have ended. A refusal alone may
  come from a firewall;
- after `runtime.node_s` without a sign of life in the job's store: the machine, or its
  network, has failed silently.

Owns: the connections, and the time since each sign. Must not: act on a loss.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_ckpt.elastic.machines import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A lost machine."""

    why: str
    """Why the machine counts as lost, in words."""

    last_seen_unix_s: float
    """Time at which this machine has seen the last sign of life, in seconds of Unix
    time by this machine's clock.
    """


@dataclass(kw_only=True, slots=True, eq=False)
class _Watched:
    """A machine that is watched."""

    machine: Machine
    """The machine, at its present address."""

    sign: float
    """The newest sign of life, as the machine has written it; 0: none."""

    changed_s: float
    """Time from which the machine has been silent, on this machine's monotonic clock.
    """

    seen_unix_s: float
    """Time at which the newest sign was read first, or a connection ended last, in
    seconds of Unix time by this machine's clock. Before: the time of the first watch.
    """

    link: socket.socket | None = None
    """A connection to the machine, or an attempt at one; None: there is none."""

    is_connected: bool = False
    """Whether the connection is established."""

    has_ended: bool = False
    """Whether a connection has ended."""

    is_refused: bool = False
    """Whether an attempt was refused after a connection had ended."""


class LostMachines:
    """Watches machines from this one. No method waits.

    Args:
        node_s: `runtime.node_s`.
        selector: Gets the connections, each with `ready` as its data.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        node_s: float,
        selector: selectors.BaseSelector,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_s = node_s
        self._selector = selector
        self._now = now
        self._watched: dict[str, _Watched] = {}
        self._looked_s = now()

    def watch(self, machines: Mapping[str, Machine]) -> None:
        """Watch these machines from now on, and no others.

        Args:
            machines: The machines by name, at their present addresses.
        """
        for name in self._watched.keys() - machines.keys():
            self._close(self._watched.pop(name))
        for name, machine in machines.items():
            known = self._watched.get(name)
            if known is None:
                known = _Watched(
                    machine=machine,
                    sign=0.0,
                    changed_s=self._now(),
                    seen_unix_s=time.time(),
                )
                self._watched[name] = known
            elif known.machine != machine:
                self._close(known)
                known.machine, known.is_refused = machine, False
            if known.link is None and not known.is_refused:
                self._connect(known)

    def look(self, signs: Mapping[str, float]) -> dict[str, Loss]:
        """Return the machines that are lost.

        Args:
            signs: The newest sign of life of each watched machine that has given one.
        """
        now_s = self._now()
        # this machine may have been stopped, or cut off from the store: what it has not
        # seen meanwhile is no silence of others
        has_paused = now_s - self._looked_s > self._node_s / 2
        self._looked_s = now_s
        losses: dict[str, Loss] = {}
        for name, watched in self._watched.items():
            sign = signs.get(name, 0.0)
            if sign != watched.sign:
                # not the time in the sign: clocks of machines differ
                watched.sign, watched.seen_unix_s = sign, time.time()
                watched.changed_s = now_s
            elif has_paused:
                watched.changed_s = now_s
            if why := self._why_lost(watched, now_s):
                losses[name] = Loss(why=why, last_seen_unix_s=watched.seen_unix_s)
        return losses

    def ready(self, link: socket.socket) -> None:
        """Find out what has become of a connection that the selector has returned."""
        for watched in self._watched.values():
            if watched.link is not link:
                continue
            if not watched.is_connected:
                self._judge(
                    watched, link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                )
                return
            # machines send nothing: the connection has ended
            self._close(watched)
            watched.has_ended, watched.seen_unix_s = True, time.time()
            self._connect(watched)
            return

    def close(self) -> None:
        """Close all connections."""
        self.watch({})

    def _why_lost(self, watched: _Watched, now_s: float) -> str:
        host = watched.machine.host
        if watched.is_refused:
            return f"its processes on {host} have ended"
        if now_s - watched.changed_s >= self._node_s:
            return (
                f"{host} has given no sign of life for runtime.node_s={self._node_s:g}"
                " seconds"
            )
        return ""

    def _connect(self, watched: _Watched) -> None:
        family = socket.AF_INET6 if ":" in watched.machine.host else socket.AF_INET
        watched.link = socket.socket(family)
        watched.link.setblocking(False)
        self._selector.register(watched.link, selectors.EVENT_WRITE, self.ready)
        where = watched.machine.host, watched.machine.port
        error = watched.link.connect_ex(where)
        if error != errno.EINPROGRESS:
            self._judge(watched, error)

    def _judge(self, watched: _Watched, error: int) -> None:
        """Act on the result of an attempt to connect."""
        if error == 0:
            assert watched.link is not None
            watched.is_connected = True
            self._selector.modify(watched.link, selectors.EVENT_READ, self.ready)
            return
        # otherwise there is no way to the machine, whose signs of life decide
        watched.is_refused = error == errno.ECONNREFUSED and watched.has_ended
        self._close(watched)

    def _close(self, watched: _Watched) -> None:
        if watched.link is not None:
            self._selector.unregister(watched.link)
            watched.link.close()
        watched.link, watched.is_connected = None, False
