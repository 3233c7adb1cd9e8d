"""The states that checkpoint servers have computed, as a source of recoveries.

Owns: listing and fetching the states of one rank on servers. Must not: choose the state
of a recovery. FlowCheck, section 4.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.flowcheck.server_holders import ServerHolders
from moe_ckpt.replication.fetch import clear_held, fetch_blobs, list_held
from moe_ckpt.snapshot.blobs import BlobFolder, held_path

_log = logging.getLogger(__name__)


class ServerSource:
    """Implements `SnapshotSource` with the states of one rank on servers."""

    def __init__(self, elastic: ElasticContext) -> None:
        """Store the rank's means to reach servers.

        Args:
            elastic: The rank's means to survive the loss of ranks. Its holders are
                `ServerHolders`.
        """
        assert isinstance(elastic.holders, ServerHolders), elastic.holders
        self._elastic = elastic
        self._holders = elastic.holders
        self._rank = elastic.member.global_rank
        self._listed: dict[int, frozenset[str]] = {}

    @property
    def near(self) -> BlobFolder:
        memory = self._elastic.memory
        return BlobFolder(
            memory / "from_hosts"
            if self._holders.use_hosts
            else held_path(memory, self._rank)
        )

    @property
    def is_remote(self) -> bool:
        return self._holders.use_hosts

    def list(self) -> Mapping[int, frozenset[str]]:
        """Return this rank's keys on all servers on hosts.

        The result includes servers that no longer hold this rank's states.
        """
        self._wait_for_states()
        self._listed = {}
        for holder in self._holders.on_hosts:
            try:
                keys = list_held(
                    self._holders.address(holder),
                    self._elastic.ticket,
                    self._rank,
                    timeout_s=self._elastic.copy_s,
                )
                self._listed[holder] = frozenset(keys)
            except CheckpointLoadError as error:
                _log.warning("a server has no states for this recovery: %s", error)
        return self._listed

    def fetch(self, holder: int, keys: Sequence[str]) -> int:
        near = self.near
        near.clear()  # drop the blobs of a failed fetch
        return fetch_blobs(
            self._holders.address(holder),
            self._elastic.ticket,
            self._rank,
            near,
            keys,
            timeout_s=self._elastic.copy_s,
        )

    def free_fetched(self) -> None:
        if self._holders.use_hosts:
            self.near.clear()

    def drop_strays(self) -> None:
        strays = [
            holder
            for holder, keys in self._listed.items()
            if keys and holder not in self._holders.numbers
        ]
        for holder in strays:
            try:
                clear_held(
                    self._holders.address(holder),
                    self._elastic.ticket,
                    self._rank,
                    timeout_s=self._elastic.copy_s,
                )
            except CheckpointLoadError as error:
                # an unreachable server is not used any more after the next fault
                _log.warning("older states stay: %s", error)

    def _wait_for_states(self) -> None:
        """Wait until servers have computed all states.

        A state that is computed later would miss the survey and never be dropped.
        """
        daemon = self._elastic.daemon
        if daemon is None:
            return
        self._elastic.page.wait_for_copies(True)
        try:
            # a request without keys is done once all earlier requests are done
            daemon.copy([]).result(self._elastic.copy_s)
        except (CheckpointSaveError, TimeoutError) as error:
            _log.warning(
                "servers may make further states during the survey: %s",
                error or "no answer in time",
            )
        finally:
            self._elastic.page.wait_for_copies(False)
