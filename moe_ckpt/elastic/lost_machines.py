"""Which machines of a job are lost, as seen from another machine.

A machine is lost

- at once, if the connection to it has ended, and no process listens at its address any
  more: the kernel of the machine says that its processes have ended;
- after `runtime.node_s` without a sign of life in the job's store: the machine, or its
  network, has failed silently.

Owns: the connections, and the time since each sign. Must not: act on a loss.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_ckpt.elastic.machines import Machine

_CONNECT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A lost machine."""

    why: str
    """Why the machine counts as lost, in words."""

    last_seen_unix_s: float
    """Time of the last sign of life, in seconds of Unix time."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Watched:
    """A machine that is watched."""

    machine: Machine
    """The machine, at its present address."""

    sign_unix_s: float
    """The newest sign of life, in seconds of Unix time by the machine's clock."""

    changed_s: float
    """Time at which that sign was read first, on this machine's monotonic clock."""

    link: socket.socket | None = None
    """A connection to the machine; None: there is none."""

    refused: bool = False
    """Whether the machine's kernel has refused a connection."""

    ended_unix_s: float = 0.0
    """Time at which a connection ended last, in seconds of Unix time; 0: none has."""


class LostMachines:
    """Watches machines from this one.

    Args:
        node_s: `runtime.node_s`.
        selector: Gets the connections; `ended` takes those that are readable.
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
                    machine=machine, sign_unix_s=0.0, changed_s=self._now()
                )
                self._watched[name] = known
            elif known.machine != machine:
                self._close(known)
                known.machine, known.refused = machine, False
            if known.link is None and not known.refused:
                self._connect(known)

    def look(self, signs: Mapping[str, float]) -> dict[str, Loss]:
        """Return the machines that are lost.

        Args:
            signs: The newest sign of life of each watched machine that has given one,
                in seconds of Unix time.
        """
        now_s = self._now()
        # this machine may have been stopped, or cut off from the store: what it has not
        # seen meanwhile is no silence of others
        has_paused = now_s - self._looked_s > self._node_s / 2
        self._looked_s = now_s
        for name, watched in self._watched.items():
            sign_unix_s = signs.get(name, 0.0)
            if has_paused or sign_unix_s != watched.sign_unix_s:
                watched.sign_unix_s, watched.changed_s = sign_unix_s, now_s
        losses: dict[str, Loss] = {}
        for name, watched in self._watched.items():
            if why := self._why_lost(watched, now_s):
                seen_unix_s = max(watched.sign_unix_s, watched.ended_unix_s)
                losses[name] = Loss(why=why, last_seen_unix_s=seen_unix_s)
        return losses

    def ended(self, link: object) -> None:
        """Find out what a connection means that has become readable.

        Machines send nothing, so the connection has ended.
        """
        for watched in self._watched.values():
            if watched.link is link:
                self._close(watched)
                self._connect(watched)
                watched.ended_unix_s = time.time()

    def close(self) -> None:
        """Close all connections."""
        self.watch({})

    def _why_lost(self, watched: _Watched, now_s: float) -> str:
        host = watched.machine.host
        if watched.refused:
            return f"its processes on {host} have ended"
        if now_s - watched.changed_s >= self._node_s:
            return (
                f"{host} has given no sign of life for runtime.node_s={self._node_s:g}"
                " seconds"
            )
        return ""

    def _connect(self, watched: _Watched) -> None:
        where = watched.machine.host, watched.machine.port
        began_s = self._now()
        try:
            watched.link = socket.create_connection(where, _CONNECT_S)
        except ConnectionRefusedError:
            watched.refused = True
        except OSError:
            pass  # no way to the machine: its signs of life decide
        else:
            self._selector.register(watched.link, selectors.EVENT_READ, self.ended)
        # the try is no pause of this machine: signs of life are read after it. With
        # several machines that do not answer, no silence would be long enough otherwise
        self._looked_s += min(self._now() - began_s, _CONNECT_S)

    def _close(self, watched: _Watched) -> None:
        if watched.link is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(watched.link)
            watched.link.close()
            watched.link = None
