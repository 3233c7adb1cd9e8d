"""The checkpoint servers that a job uses on machines that train nothing.

All ranks agree on the servers. Owns: the servers' numbers and addresses in the job's
store. Must not: start servers, or know states. FlowCheck, section 4.

    settings      the job's settings for servers, as JSON
    losses/N      how often server N was lost
    N/I           the address of the server that has number N after I losses

An unreachable server is lost for good, even if the server comes back: after a rollback
its states may belong to an abandoned history. The same or another server may take the
number with an empty memory. If no server does in time, the remaining servers take over
the ranks of the lost server. Without any server, the processors of the training nodes
serve the ranks until the job ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from moe_ckpt.collectives import Ranks, broadcast_result, gather_results
from moe_ckpt.config import TlsConfig
from moe_ckpt.errors import CheckpointLoadError, ConfigError
from moe_ckpt.flowcheck.mirror.settings import MirrorSettings
from moe_ckpt.replication.admission import open_connection
from moe_ckpt.replication.connection import RefusedError
from moe_ckpt.replication.messages import Address, Ticket, parse_address

PART = "servers"
"""The part of the job's store for servers."""

SETTINGS = "settings"
_BEGUN, _GONE = "begun", "gone"
_ANSWER_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRules:
    """The rules by which ranks choose servers."""

    num_servers: int
    """Number of servers of the job."""

    copies: int
    """Number of servers that hold each rank's state."""

    join_s: float
    """Seconds to wait for the first servers, at the beginning of the job."""

    wait_s: float
    """Seconds to wait for the successor of a lost server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The job's settings for its servers, which global rank 0 writes to the store."""

    num_servers: int
    """Number of servers of the job."""

    timeout_s: float
    """Time limit for progress on a connection, in seconds."""

    most_bytes_per_owner: int | None
    """Limit of the bytes that a server holds for one rank; None: no limit."""

    mirror: MirrorSettings | None
    """Settings of the servers' mirror port; None: no mirror port."""

    tls: TlsConfig
    """TLS settings of connections."""


class ServerNumbers:
    """The keys in the store, for servers and ranks."""

    def __init__(self, store: dist.Store, num_servers: int) -> None:
        self.store = store
        self.num_servers = num_servers

    def claim(self, address: Address) -> tuple[int, int] | None:
        """Take the first free number for a server.

        Args:
            address: The address of the server.

        Returns:
            The number, and how often its servers were lost so far; None if all numbers
            are taken.
        """
        for number in range(self.num_servers):
            losses = self.losses(number)
            if (
                self.store.compare_set(_key(number, losses), "", str(address))
                == str(address).encode()
            ):
                return number, losses
        return None

    def losses(self, number: int) -> int:
        """Return how often a server with this number was lost."""
        return self.store.add(f"losses/{number}", 0)

    def lose(self, number: int) -> None:
        """Abandon the present server with this number for good."""
        self.store.add(f"losses/{number}", 1)

    def address(self, number: int) -> str:
        """Return the address of the present server; empty if there is none."""
        key = _key(number, self.losses(number))
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def wait(self, number: int, timeout_s: float) -> str:
        """Wait for the present server with a number.

        Args:
            number: The number.
            timeout_s: The time limit, in seconds.

        Returns:
            The address of the server; empty if no server comes in time.
        """
        try:
            self.store.wait(
                [_key(number, self.losses(number))],
                timedelta(seconds=max(timeout_s, 0.001)),
            )
        except dist.DistStoreError:
            return ""
        return self.address(number)


class ServerHosts:
    """One rank's view of the servers, for the rank's training thread."""

    def __init__(
        self,
        store: dist.Store,
        ticket: Ticket,
        rules: ServerRules,
        waits: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Begin without servers.

        Args:
            store: The part `PART` of the job's store.
            ticket: The run, and its secret, for connections to servers.
            rules: The rules by which ranks choose servers.
            waits: Returns a context inside which the training thread waits for servers.
        """
        self._numbers = ServerNumbers(store, rules.num_servers)
        self._store = store
        self._ticket = ticket
        self._rules = rules
        self._waits = waits
        self._addresses: tuple[str, ...] = ()

    @property
    def is_in_use(self) -> bool:
        """Whether the job uses servers on hosts.

        False before the first agreement, and once all servers are lost.
        """
        return any(self._addresses)

    @property
    def present(self) -> list[str]:
        """The addresses of all servers in use."""
        return [address for address in self._addresses if address]

    @property
    def numbers(self) -> list[int]:
        """The numbers of all servers in use."""
        return [number for number, address in enumerate(self._addresses) if address]

    def address(self, number: int) -> Address:
        """Return the address of a server in use."""
        return parse_address(self._addresses[number])

    def holders(self, global_rank: int) -> list[int]:
        """Return the numbers of the servers that hold a rank's state.

        The numbers are those of the next servers in use, from the rank's own number on.
        With 3 servers, and 2 for each rank, rank 4 has servers 1 and 2, or servers 2
        and 0 once server 1 is lost.
        """
        in_turn = [
            (global_rank + hop) % len(self._addresses)
            for hop in range(len(self._addresses))
        ]
        return [number for number in in_turn if self._addresses[number]][
            : self._rules.copies
        ]

    def agree(self, ranks: Ranks) -> bool:
        """Agree on the servers to use from now on. Collective.

        Returns:
            Whether the servers differ from the servers before.

        Raises:
            ConfigError: The job begins, and its servers do not come in time. Raised on
                all ranks.
            CheckpointLoadError: Rank 0 could not choose the servers. Raised on all
                ranks.
        """
        reached = gather_results(ranks, self._look, ConfigError)
        # rank 0 chooses for all ranks: ranks that read the store at different moments
        # would find different servers
        found = broadcast_result(
            ranks, lambda: self._choose(reached), CheckpointLoadError
        )
        before, self._addresses = self._addresses, found
        return found != before

    def _look(self) -> tuple[str, ...]:
        """Return the addresses of all servers that this rank reaches, by number.

        The addresses of other servers are empty.
        """
        # here, and not in `agree` around both steps: each collective operation ends the
        # wait of its rank
        with self._waits():
            # later a missing server is replaced or abandoned
            if not self._store.check([_BEGUN]):
                until_s = time.monotonic() + self._rules.join_s
                come = [
                    self._numbers.wait(each, until_s - time.monotonic())
                    for each in range(self._rules.num_servers)
                ]
                if not all(come):
                    got = (
                        f"{sum(map(bool, come))} servers in"
                        f" runtime.join_s={self._rules.join_s:g} seconds"
                    )
                    wanted = (
                        f"{len(come)}: start `moe-ckpt server RUN_FOLDER` on that many"
                        " machines"
                    )
                    raise ConfigError(f"ckpt.server_hosts: got {got}, wanted {wanted}")
            addresses = map(self._numbers.address, range(self._rules.num_servers))
            return tuple(
                address if address and self._answers(address) else ""
                for address in addresses
            )

    def _answers(self, address: str) -> bool:
        try:
            # with the ticket: a process of another run may have got the port of a lost
            # server
            open_connection(parse_address(address), self._ticket, _ANSWER_S).close()
        except (OSError, RefusedError) as error:
            _log.warning(
                "the checkpoint server at %s does not answer: %s", address, error
            )
            return False
        return True

    def _choose(self, reached: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the addresses that all ranks have reached, and those of successors.

        Call on rank 0 only.
        """
        if self._store.check([_GONE]):
            return ()
        self._store.set(_BEGUN, "1")
        # a server that one rank cannot reach is lost for all ranks, as each server may
        # have to hold the state of any rank
        common = [
            of_all[0] if len(set(of_all)) == 1 else ""
            for of_all in zip(*reached, strict=True)
        ]
        until_s = time.monotonic() + self._rules.wait_s
        with self._waits():
            for number, address in enumerate(common):
                if not address:
                    common[number] = self._replace(number, until_s)
        if not any(common):
            self._store.set(_GONE, "1")
            _log.warning(
                "all checkpoint servers are gone: the training nodes serve themselves"
                " from now on, and begin with a whole snapshot"
            )
            return ()
        return tuple(common)

    def _replace(self, number: int, until_s: float) -> str:
        """Abandon a server for good, and return the address of its successor.

        Returns:
            An empty address if no successor comes in time.
        """
        if lost := self._numbers.address(number):
            # for good, even if the server comes back: its states may belong to a
            # history that ranks have abandoned
            self._numbers.lose(number)
            _log.warning("checkpoint server %d at %s is lost", number, lost)
        successor = self._numbers.wait(number, until_s - time.monotonic())
        if successor:
            _log.warning(
                "checkpoint server %d is now at %s, and begins with a whole snapshot",
                number,
                successor,
            )
        elif lost:
            limit = f"ckpt.server_wait_s={self._rules.wait_s:g} seconds"
            _log.warning(
                "checkpoint server %d is gone: no other took its place within %s",
                number,
                limit,
            )
        return successor


def _key(number: int, losses: int) -> str:
    return f"{number}/{losses}"
