"""Settings of each checkpoint policy and of the runtime, as plain values.

Every check of a value names the setting in its error. Must not: know Hydra.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from moe_ckpt.errors import ConfigError

AUTO = "auto"
"""Value of a setting that the project chooses itself."""


def require(condition: bool, setting: str, got: object, wanted: str) -> None:
    """Raise ConfigError unless a condition holds.

    Args:
        condition: Whether the value is allowed.
        setting: Name of the setting, for the message.
        got: The value of the setting, for the message.
        wanted: The allowed values in words, for the message.

    Raises:
        ConfigError: The condition does not hold.
    """
    if not condition:
        raise ConfigError(f"{setting}: got {got!r}, wanted {wanted}")


def is_utf8(text: str) -> bool:
    """Return whether a text can be written in UTF-8.

    A file name whose bytes are not UTF-8 cannot: Python represents such bytes by
    surrogates.
    """
    return not any("\ud800" <= character <= "\udfff" for character in text)


def require_choice(setting: str, got: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `got` is one of `choices`."""
    require(got in choices, setting, got, "one of " + ", ".join(choices))


def require_at_least(setting: str, got: float, least: float) -> None:
    """Raise ConfigError unless `got` is at least `least`."""
    require(got >= least, setting, got, f"at least {least}")


def require_all_at_least(prefix: str, values: object, **least: float) -> None:
    """Raise ConfigError if one of several settings is below its minimum.

    Args:
        prefix: Text before each name in the message, such as `ckpt.`.
        values: The object that has the settings as attributes.
        **least: The minimum of each setting, by the attribute's name. A value of None
            has no minimum.

    Raises:
        ConfigError: A setting is less than its minimum.
    """
    for name, number in least.items():
        got = getattr(values, name)
        if got is not None:
            require_at_least(f"{prefix}{name}", got, number)


def require_auto(
    setting: str, got: int | str, least: int, what: str = "a number of iterations"
) -> None:
    """Raise ConfigError unless `got` is auto or an integer of at least `least`.

    Args:
        setting: Name of the setting, for the message.
        got: The value of the setting.
        least: The smallest number allowed.
        what: The kind of number, for the message.

    Raises:
        ConfigError: The value is neither.
    """
    valid = got == AUTO or (isinstance(got, int) and got >= least)
    require(valid, setting, got, f"auto or {what} of at least {least}")


def require_switch(setting: str, got: bool | str) -> None:
    """Raise ConfigError unless `got` is true, false or auto."""
    require(got in (True, False, AUTO), setting, got, f"{AUTO}, true or false")


def is_on(switch: bool | str, *, by_default: bool) -> bool:
    """Return whether a setting of `require_switch` is on.

    Args:
        switch: The value of the setting.
        by_default: The result for auto.
    """
    return by_default if switch == AUTO else bool(switch)


def require_patterns(setting: str, patterns: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that is not a valid regular expression.

    Args:
        setting: Name of the setting, for the message.
        patterns: The patterns.

    Raises:
        ConfigError: A pattern is invalid; the message names the setting.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            require(False, setting, pattern, f"regular expressions ({error})")


def parse_endpoints(setting: str, text: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a text `HOST:PORT,HOST:PORT`.

    Args:
        setting: Name of the setting, for the message.
        text: The value of the setting.

    Raises:
        ConfigError: The text has another form; the message names the setting.
    """
    found = [re.fullmatch(r"\s*([^:\s]+):(\d+)\s*", part) for part in text.split(",")]
    endpoints = [(part[1], int(part[2])) for part in found if part]
    valid = len(endpoints) == len(found) and all(
        0 < port < 1 << 16 for _, port in endpoints
    )
    require(
        valid,
        setting,
        text,
        "HOST:PORT of one member or more, with commas between them",
    )
    return endpoints


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Name of a policy, and defaults for questions of the engine and the launcher.

    A policy with another answer overrides the class variable or property.
    """

    policy: str
    """Name of the checkpoint policy, a key of `CKPT_CONFIGS`."""

    recovers_locally: ClassVar[bool] = False
    """Whether only lost state is rebuilt: of lost stages by replay, or of lost ranks by
    logged gradients. All other ranks keep their state.
    """

    loses_tokens: ClassVar[bool] = False
    """Whether a snapshot contains only some experts, so that a rollback makes others
    older.
    """

    asks_popularity: ClassVar[bool] = False
    """Whether the policy chooses experts by their tokens, which ranks then count."""

    copies_within_stage: ClassVar[bool] = False
    """Whether the peers of a rank are ranks of the same pipeline stage."""

    def __post_init__(self) -> None:
        # for configurations that programs build directly: the launcher and
        # `moe_ckpt.run` choose the class by the policy
        require_choice(
            "ckpt.policy",
            self.policy,
            [name for name, kind in CKPT_CONFIGS.items() if kind is type(self)],
        )

    @property
    def in_memory(self) -> InMemoryConfig | None:
        """This configuration if the policy keeps snapshots in host memory, else None.

        Such a policy survives the loss of ranks.
        """
        return self if isinstance(self, InMemoryConfig) else None

    @property
    def replays(self) -> bool:
        """Whether recoveries run iterations again whose results have to be the same."""
        return False

    @property
    def logs_gradients(self) -> bool:
        """Whether each rank logs the gradients with which it takes its steps."""
        return False

    @property
    def logs_boundaries(self) -> bool:
        """Whether ranks log the tensors that cross stages."""
        return False

    @property
    def copies_gradients(self) -> bool:
        """Whether peers keep copies of logged gradients."""
        return False

    @property
    def keeps_own_copy(self) -> bool:
        """Whether a rank's own replica daemon also keeps copies of the rank's state."""
        return False

    @property
    def shares_groups(self) -> bool:
        """Whether process groups of the same ranks may share their connections."""
        return True

    @property
    def waits_for_disk(self) -> bool:
        """Whether each snapshot is on disk before the next one is taken."""
        return False

    @property
    def copies_in_bubbles(self) -> bool:
        """Whether copies to host memory wait for pipeline bubbles."""
        return False

    @property
    def capacity_boost(self) -> float:
        """Share of extra capacity for experts with lost tokens.

        With 0 the routers stay unchanged.
        """
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoneConfig(PolicyConfig):
    """`ckpt=none`: saves nothing; after a fault the run restarts from the beginning.

    `attach` reads `keep`, `async_save` and `strict` of every policy; no checkpoint uses
    the values here.
    """

    keep: ClassVar[int] = 1
    async_save: ClassVar[bool] = False
    strict: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class SavingConfig(PolicyConfig):
    """Settings of all policies that save whole checkpoints.

    Whole checkpoints have Megatron's dist_checkpointing format.
    """

    keep: int
    """Number of whole checkpoints kept on disk; older ones are deleted."""

    async_save: bool
    """Whether a thread writes checkpoints from a copy in host memory while training
    continues.
    """

    strict: bool
    """Whether a checkpoint or snapshot that cannot be saved ends the run.

    False: the failure is reported, and training continues.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBytesPerS:
    """`ckpt.max_bytes_per_s`: caps on the copies of each rank, in bytes per second.

    None means no cap. Recoveries, step logs and whole checkpoints have no cap. Boundary
    logs have no cap either, because their copies keep buffers of the accelerator in
    use.
    """

    host: float | None
    """Cap on snapshots to host memory, in bytes per second."""

    peers: float | None
    """Cap on snapshots to all peers together, in bytes per second."""

    disk: float | None
    """Cap on blobs to the local disk, in bytes per second."""

    def __post_init__(self) -> None:
        for name in ("host", "peers", "disk"):
            got = getattr(self, name)
            wanted = "more than 0 bytes a second, or null: no cap"
            require(
                got is None or 0 < got < math.inf,
                f"ckpt.max_bytes_per_s.{name}",
                got,
                wanted,
            )


NO_CAPS = MaxBytesPerS(host=None, peers=None, disk=None)
"""No cap on any copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """`ckpt.tls`: PEM files of a node for TLS between replica daemons.

    Either all paths are set or none. Without paths, copies cross the network in clear.
    A run checks the files when it starts.
    """

    certificate: str | None
    """Certificate of this node, with the chain to the authority if there is one."""

    key: str | None
    """Private key of this node, without a password."""

    authority: str | None
    """Certificates that sign the certificates of all nodes."""

    def __post_init__(self) -> None:
        paths = {
            name: getattr(self, name) for name in ("certificate", "key", "authority")
        }
        for name, path in paths.items():
            wanted = (
                "a path, as the other keys of ckpt.tls have, or null for all of them"
            )
            require(
                (path is not None) == any(paths.values()),
                f"ckpt.tls.{name}",
                path,
                wanted,
            )


NO_TLS = TlsConfig(certificate=None, key=None, authority=None)
"""No TLS: copies cross the network in clear."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicationConfig:
    """Copies in the memory of other nodes: `ckpt.replicas` and the keys beside it."""

    replicas: int | str
    """Copies of snapshots in other nodes' memory; auto: 1, or 0 on a single node.

    FlowCheck: servers of each rank beside its first one; auto: 1, or 0 on a single node
    or host.
    """

    network_interface: str | None
    """Interface on which copies, or FlowCheck's gradients, arrive; None: the one that
    leads to the rendezvous.
    """

    tls: TlsConfig
    """TLS files for copies between nodes."""

    def __post_init__(self) -> None:
        require_auto("ckpt.replicas", self.replicas, 0, "a number of copies")


NO_REPLICATION = ReplicationConfig(replicas=0, network_interface=None, tls=NO_TLS)
"""No copies in the memory of other nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDiskConfig:
    """Snapshots on a disk of each node: `ckpt.disk_every_iters` and its neighbours."""

    every_iters: int
    """Iterations between snapshots, or windows of them, that also go to disk; 0: none.
    """

    path: str | None
    """Folder for snapshots on disk; None: the run folder.

    The folder is on a local disk of each node. MoC-System needs a folder that all nodes
    share, and CheckFreq may use one.
    """

    budget_bytes: int | None
    """Bytes that a rank may use in `path`; None: no limit."""

    def __post_init__(self) -> None:
        require_all_at_least("ckpt.disk_", self, every_iters=0, budget_bytes=1)


@dataclass(frozen=True, kw_only=True)
class EverySnapshotToDisk(LocalDiskConfig):
    """The disk of a policy that writes each snapshot before it takes the next one.

    The policy has no key `ckpt.disk_every_iters`.
    """

    every_iters: int = field(default=1, init=False)
    """Each snapshot goes to disk."""


NO_DISK = LocalDiskConfig(every_iters=0, path=None, budget_bytes=None)
"""No snapshot goes to disk while training continues."""


@dataclass(frozen=True, kw_only=True)
class DenseConfig(SavingConfig):
    """`ckpt=dense`: the whole state on disk in Megatron's dist_checkpointing format."""

    every_iters: int
    """Iterations between checkpoints."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.every_iters", self.every_iters, 1)


@dataclass(frozen=True, kw_only=True)
class HostMemoryConfig(SavingConfig):
    """Settings of all policies that keep snapshots in host memory.

    These policies survive the loss of ranks.
    """

    memory_budget_bytes: int | None
    """Host memory that a rank may use for snapshots, logs and servers; None: no limit.
    """

    durable_every_iters: int
    """Iterations between whole checkpoints on disk, in Megatron's format; 0: none."""

    replication: ReplicationConfig
    """Copies in the memory of other nodes."""

    disk: LocalDiskConfig
    """Snapshots on a disk of each node."""

    max_bytes_per_s: MaxBytesPerS
    """Caps on the copies of each rank."""

    @property
    def peer_replicas(self) -> int | str:
        """Copies of snapshots in other training nodes' memory; auto: 1 if possible."""
        return self.replication.replicas

    def __post_init__(self) -> None:
        super().__post_init__()
        require_all_at_least(
            "ckpt.", self, durable_every_iters=0, memory_budget_bytes=1
        )
        capped = self.max_bytes_per_s.peers
        wanted = "null where ckpt.replicas=0: nothing is copied to peers"
        require(
            capped is None or self.replication.replicas != 0,
            "ckpt.max_bytes_per_s.peers",
            capped,
            wanted,
        )


POPULARITIES = ("hard", "soft", "decayed")
"""Measures of an expert's popularity.

`hard`: tokens. `soft`: the gate's probabilities, over all experts. `decayed`: tokens
with a decaying weight of the past.
"""


REPLAY, GRADIENTS = RECOVERIES = ("replay", "gradients")
"""Ways to lead on from a window of `ckpt=moevement`.

`replay`: lost stages run iterations again, with logged inputs. `gradients`: lost ranks
take their steps again, with logged gradients.
"""


@dataclass(frozen=True, kw_only=True)
class MoevementConfig(HostMemoryConfig):
    """`ckpt=moevement`: sparse snapshots every iteration, and localized recovery.

    Snapshots are in host memory. MoEvement, section 3.
    """

    recovery: str
    """How a recovery leads on from a window, one of `RECOVERIES`.

    auto: gradients where `run.exactness` is state, which excludes a replay; else
    replay.
    """

    replicate_gradients: bool
    """Whether peers keep copies of logged gradients; for `recovery` gradients.

    False: after the loss of a node all ranks go back to a window on disk.
    """

    audit_every_iters: int
    """Iterations between audits, which rebuild each rank's state from a window and
    logged gradients, and compare; for `recovery` gradients.

    0: no audits.
    """

    window: int | str
    """Iterations in which every operator is taken once; auto: the window that loses
    least time.
    """

    pause_iters: int | str
    """Iterations without snapshots after each window.

    auto: chosen together with the window if `window` is auto, else 0.
    """

    mtbf_s: float
    """Mean time between failures of the whole job, in seconds; for `window` auto."""

    overhead: float
    """Largest share of the time that snapshots may add; for `window` auto.

    1: the window that loses the least time.
    """

    profile_iters: int
    """Iterations measured before the first window is chosen; for `window` auto.

    A dense snapshot serves until then.
    """

    window_drift: float
    """Share of lost time that another window must save to replace this one; for
    `window` auto.
    """

    paper_exact: bool
    """Whether Algorithm 1 is used as printed.

    The algorithm as printed takes the fewest slots without a stall, operators of equal
    size, and no pause.
    """

    popularity: str
    """Measure that orders experts, one of `POPULARITIES`."""

    popularity_decay: float
    """Weight of the past against one iteration; for `popularity` decayed."""

    reorder_change: float
    """Change of popularity, as a share, above which an expert counts as changed."""

    reorder_share: float
    """Share of changed experts at which the next window has a new order."""

    boundary_log: bool
    """Whether ranks log the tensors that cross stages, so that a lost stage recovers
    alone.

    False: all stages roll back. Without effect with `recovery` gradients, which needs
    no such log.
    """

    keep_windows: int
    """Complete windows kept beside the one being taken."""

    recovers_locally: ClassVar[bool] = True
    asks_popularity: ClassVar[bool] = True

    @property
    def replays(self) -> bool:
        return self.recovery == REPLAY

    @property
    def logs_gradients(self) -> bool:
        return self.recovery == GRADIENTS

    @property
    def logs_boundaries(self) -> bool:
        return self.boundary_log and not self.logs_gradients

    @property
    def copies_gradients(self) -> bool:
        return self.logs_gradients and self.replicate_gradients

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("ckpt.recovery", self.recovery, [AUTO, *RECOVERIES])
        wanted = (
            f"{AUTO} or {REPLAY} with ckpt.paper_exact=true: Algorithm 1 counts compute"
            " weights, which only a replay needs"
        )
        require(
            not (self.logs_gradients and self.paper_exact),
            "ckpt.recovery",
            self.recovery,
            wanted,
        )
        require_auto("ckpt.window", self.window, 1)
        require_auto("ckpt.pause_iters", self.pause_iters, 0)
        require(self.mtbf_s > 0, "ckpt.mtbf_s", self.mtbf_s, "more than 0")
        require(
            0.0 < self.overhead <= 1.0,
            "ckpt.overhead",
            self.overhead,
            "more than 0 and at most 1",
        )
        require_all_at_least(
            "ckpt.",
            self,
            profile_iters=2,
            window_drift=0,
            reorder_change=0,
            keep_windows=1,
            audit_every_iters=0,
        )
        require(
            self.logs_gradients or not self.audit_every_iters,
            "ckpt.audit_every_iters",
            self.audit_every_iters,
            f"0, or ckpt.recovery={GRADIENTS}: audits take steps by logged gradients",
        )
        require_choice("ckpt.popularity", self.popularity, POPULARITIES)
        for name in ("popularity_decay", "reorder_share"):
            require(
                0.0 <= getattr(self, name) <= 1.0,
                f"ckpt.{name}",
                getattr(self, name),
                "between 0 and 1",
            )


@dataclass(frozen=True, kw_only=True)
class RollbackConfig(HostMemoryConfig):
    """Settings of policies under which all ranks roll back to the newest snapshot."""

    keep_windows: ClassVar[int] = 1
    audit_every_iters: ClassVar[int] = 0  # audits need logged gradients
    # the account of lost tokens is exact: whole tokens, no probabilities, no decay
    popularity: ClassVar[str] = "hard"
    popularity_decay: ClassVar[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class WholeSnapshotsConfig(RollbackConfig):
    """Settings of policies that copy the whole state to host memory at intervals."""

    every_iters: int | str
    """Iterations between snapshots; auto: chosen by measured costs."""

    profile_iters: int
    """Iterations measured before the first interval is chosen; for `every_iters` auto.
    """

    interval_drift: float
    """Share by which the best interval must differ to replace this one; for
    `every_iters` auto.
    """

    @property
    def waits_for_disk(self) -> bool:
        return self.disk.every_iters == 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_auto("ckpt.every_iters", self.every_iters, 1)
        require_all_at_least("ckpt.", self, profile_iters=2, interval_drift=0)


@dataclass(frozen=True, kw_only=True)
class GeminiConfig(WholeSnapshotsConfig):
    """`ckpt=gemini`: snapshots in a rank's and its peers' host memory (Gemini).

    With `every_iters` auto the interval is the best one for the MTBF.
    """

    mtbf_s: float
    """Mean time between failures of the whole job, in seconds; for `every_iters` auto.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mtbf_s > 0, "ckpt.mtbf_s", self.mtbf_s, "more than 0")


@dataclass(frozen=True, kw_only=True)
class CheckfreqConfig(WholeSnapshotsConfig):
    """`ckpt=checkfreq`: snapshots to host memory, and from there to disk (CheckFreq).

    With `every_iters` auto snapshots are as frequent as `overhead` allows.
    """

    overhead: float
    """Largest share of the time that snapshots may add; for `every_iters` auto."""

    disk: EverySnapshotToDisk
    """Folder for all snapshots, on a disk of each node or one that all nodes share."""

    replication: ReplicationConfig = field(default=NO_REPLICATION, init=False)
    """No copies: snapshots on disk outlive their node if all nodes share the disk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0.0 < self.overhead < 1.0,
            "ckpt.overhead",
            self.overhead,
            "more than 0 and less than 1",
        )


@dataclass(frozen=True, kw_only=True)
class PartialConfig(RollbackConfig):
    """Settings of policies that copy only some experts; a rollback loses tokens."""

    every_iters: int
    """Iterations between snapshots."""

    loses_tokens: ClassVar[bool] = True
    asks_popularity: ClassVar[bool] = True
    profile_iters: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.every_iters", self.every_iters, 1)


@dataclass(frozen=True, kw_only=True)
class MocConfig(PartialConfig):
    """`ckpt=moc`: some experts of each layer to host memory, some of those to storage.

    MoC-System.
    """

    k_snapshot: int | str
    """Experts of each layer in a snapshot; auto: as many as the next iteration hides.
    """

    k_persist: int
    """Experts of each layer, out of those in memory, that go to storage."""

    selection: str
    """`sequential` (in turns, over layers and ranks) or `load` (most unsaved tokens).
    """

    partial: str
    """State of the other experts that a snapshot leaves out.

    `both`, `weights` (FP32 masters) or `moments`.
    """

    dynamic_k: bool
    """Whether the number of experts doubles when lost tokens come near `plt_limit`."""

    plt_limit: float
    """Share of all tokens that faults may cost; for `dynamic_k`."""

    replication: ReplicationConfig = field(default=NO_REPLICATION, init=False)
    """No copies: snapshots on disk outlive their node if all nodes share the disk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_auto("ckpt.k_snapshot", self.k_snapshot, 1, "a number of experts")
        require_at_least("ckpt.k_persist", self.k_persist, 1)
        wanted = (
            f"at most ckpt.k_snapshot={self.k_snapshot}: what is persisted is some of"
            " what is in memory"
        )
        fits = self.k_snapshot == AUTO or self.k_persist <= int(self.k_snapshot)
        require(fits, "ckpt.k_persist", self.k_persist, wanted)
        require_choice("ckpt.selection", self.selection, ["sequential", "load"])
        require_choice("ckpt.partial", self.partial, ["both", "weights", "moments"])
        require(
            0.0 < self.plt_limit < 1.0,
            "ckpt.plt_limit",
            self.plt_limit,
            "more than 0 and less than 1",
        )


@dataclass(frozen=True, kw_only=True)
class MoetionConfig(PartialConfig):
    """`ckpt=moetion`: experts with the most tokens at risk, within budgets (MoEtion).

    Each link has a budget: the experts that memory and peers receive between snapshots.
    """

    experts: int | str
    """Experts per layer in a snapshot, on average.

    auto: as many as can be copied to host memory between snapshots.
    """

    remote_experts: int | str
    """Experts per layer, out of those in memory, that peers keep.

    auto: as many as can be sent to peers between snapshots.
    """

    send_gradients: bool
    """Whether peers that have an expert of the iteration before receive its gradients
    only.

    The peers then take the optimizer's step themselves.
    """

    bubble_copies: bool
    """Whether copies to host memory use the time in which a stage waits for others."""

    boost: float
    """Extra capacity of experts with lost tokens, as a share.

    The capacity is one that other experts leave unused.
    """

    copies_within_stage: ClassVar[bool] = True
    # experts in snapshots are whole
    partial: ClassVar[str] = "both"

    @property
    def copies_in_bubbles(self) -> bool:
        return self.bubble_copies

    @property
    def capacity_boost(self) -> float:
        return self.boost

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experts", "remote_experts"):
            require_auto(
                f"ckpt.{name}", getattr(self, name), 1, "a number of experts a layer"
            )
        if isinstance(self.experts, int) and isinstance(self.remote_experts, int):
            wanted = (
                f"at most ckpt.experts={self.experts}: what peers keep is some of what"
                " is in memory"
            )
            require(
                self.remote_experts <= self.experts,
                "ckpt.remote_experts",
                self.remote_experts,
                wanted,
            )
        require(0.0 <= self.boost <= 1.0, "ckpt.boost", self.boost, "between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class FlowcheckConfig(RollbackConfig):
    """`ckpt=flowcheck`: checkpoint servers repeat each step of training (FlowCheck).

    The servers get the gradients of every iteration.
    """

    capture: str
    """`tap` (ranks send gradients) or `mirror` (servers read a mirror port of the
    network).
    """

    mirror_interface: str | None
    """Interface of the mirror port; None for `capture` tap.

    `lo` if all ranks are on one machine.
    """

    captures: int
    """Ranks of each ring that are watched; for `capture` mirror.

    Frames that one capture lost are taken from another.
    """

    capture_loss: float
    """Share of frames that each capture drops, for experiments; for `capture` mirror.
    """

    max_lag_iters: int
    """Iterations by which servers may lag before they receive a whole snapshot instead.

    0: training waits for the servers.
    """

    servers: str
    """`peers` (on training nodes) or `hosts` (on machines that train nothing).

    On hosts the command `moe-ckpt server` starts a server.
    """

    server_hosts: int
    """Number of machines with servers, for which the job waits at its start.

    For `servers` hosts.
    """

    server_wait_s: float
    """Seconds that training waits for the successor of a lost server; for `servers`
    hosts.
    """

    disk: LocalDiskConfig = field(default=NO_DISK, init=False)
    """No snapshots on disk: servers receive the gradients of each iteration."""

    max_bytes_per_s: MaxBytesPerS = field(default=NO_CAPS, init=False)
    """No caps: a server that receives gradients late gets a whole snapshot instead,
    which has more bytes.
    """

    profile_iters: ClassVar[int] = 0

    @property
    def keeps_own_copy(self) -> bool:
        return True

    @property
    def shares_groups(self) -> bool:
        # a mirror port finds sums among the operations of one group
        return not self.mirrors

    @property
    def peer_replicas(self) -> int | str:
        # training nodes hold copies only once all servers on hosts are lost
        return AUTO if self.on_hosts else self.replication.replicas

    @property
    def mirrors(self) -> bool:
        """Whether servers read gradients from a mirror port."""
        return self.capture == "mirror"

    @property
    def on_hosts(self) -> bool:
        """Whether servers run on machines that train nothing."""
        return self.servers == "hosts"

    @property
    def server_copies(self) -> int:
        """Number of servers on hosts that hold the state of each rank."""
        return 1 + (
            min(1, self.server_hosts - 1)
            if self.replication.replicas == AUTO
            else int(self.replication.replicas)
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("ckpt.capture", self.capture, ["tap", "mirror"])
        # a single capture misses a share of every gradient
        require_all_at_least(
            "ckpt.",
            self,
            captures=2,
            max_lag_iters=0,
            server_hosts=1,
            server_wait_s=0.0,
        )
        require(
            0.0 <= self.capture_loss < 1.0,
            "ckpt.capture_loss",
            self.capture_loss,
            "at least 0 and less than 1",
        )
        interface = self.mirror_interface
        wanted = (
            "an interface where ckpt.capture=mirror, and null where ckpt.capture=tap"
        )
        require(
            (interface is not None) == self.mirrors,
            "ckpt.mirror_interface",
            interface,
            wanted,
        )
        wanted = "0 where ckpt.capture=tap"
        require(
            self.mirrors or self.capture_loss == 0.0,
            "ckpt.capture_loss",
            self.capture_loss,
            wanted,
        )
        require_choice("ckpt.servers", self.servers, ["peers", "hosts"])
        wanted = "1 where ckpt.servers=peers: every training node has a server"
        require(
            self.on_hosts or self.server_hosts == 1,
            "ckpt.server_hosts",
            self.server_hosts,
            wanted,
        )
        wanted = (
            f"less than ckpt.server_hosts={self.server_hosts} where ckpt.servers=hosts"
        )
        fits = not self.on_hosts or self.server_copies <= self.server_hosts
        require(fits, "ckpt.replicas", self.replication.replicas, wanted)


InMemoryConfig = (
    MoevementConfig
    | GeminiConfig
    | CheckfreqConfig
    | MocConfig
    | MoetionConfig
    | FlowcheckConfig
)
"""Policies that keep snapshots in host memory, and survive the loss of ranks."""

DIVERGENCES = ("window", "end")
"""Actions if a replay does not reproduce a healthy rank's state.

`window`: the stages that have replayed replay once more, and training goes on from
that replay. `end`: the job ends.
"""

SICK_PLACES = ("end", "leave")
"""Actions on a sick node (`runtime.sick_place`).

`end`: the job ends. `leave`: the node leaves the job to a spare node.
"""

NCCL, GLOO, STAGED = "nccl", "gloo", "staged"
BACKENDS = (AUTO, NCCL, GLOO, STAGED)
"""Libraries that move bytes between ranks.

`staged` is gloo for tensors of a GPU, by way of host memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """How a job survives the death of its processes.

    conf/runtime/default.yaml has the rule for each time.
    """

    guard: bool | str
    """Whether a supervisor of each rank replaces its worker.

    auto: if the policy recovers lost ranks from memory.
    """

    backend: str
    """Backend of collectives, one of `BACKENDS`; auto: nccl on GPUs, gloo on CPUs."""

    share_gpus: bool
    """Whether ranks share GPUs under nccl, for tests on one node.

    NCCL then takes a shared GPU for GPUs of different hosts.
    """

    heartbeat_s: float
    """Seconds without a sign of life after which a worker counts as dead.

    Must be longer than any stop of a whole process.
    """

    progress_s: float
    """Seconds of computation without communication after which a worker counts as hung.

    Must be longer than the longest computation.
    """

    form_s: float
    """Seconds to form all process groups of a generation."""

    operation_s: float
    """Seconds for one communication operation.

    More than `progress_s`, because ranks wait while others compute.
    """

    abort_s: float
    """Seconds to abort NCCL's communicators.

    A worker that needs longer ends and is replaced.
    """

    join_s: float
    """Seconds that survivors wait for a replacement.

    More than `progress_s` + `form_s`, and longer than the time to build the model.
    """

    grace_s: float
    """Seconds in which operations that were cut may fail by themselves.

    After that time the worker abandons the operations.
    """

    copy_s: float
    """Seconds that copies of a window may take before the window counts as not kept."""

    max_deaths: int
    """Deaths of one rank in a row without progress after which the job gives up."""

    sick_deaths: int
    """Deaths of one rank at one place within `sick_within_s` after which the place is
    sick.

    0: any number of deaths is allowed.
    """

    sick_within_s: float
    """Seconds in which `sick_deaths` count."""

    health: str
    """Command that runs before a worker is replaced; empty: none.

    RANK and LOCAL_RANK are set. A status other than 0 means that the place is sick.
    """

    health_s: float
    """Seconds that the command may take; less than `join_s`."""

    sick_place: str
    """Action at a sick place, one of `SICK_PLACES`."""

    standby: bool | str
    """Whether a process of each rank waits, warm, to replace the rank's worker.

    auto: on GPUs that keep `run_elastic.STANDBY_LEAVES_BYTES` of free memory.
    """

    etcd: str
    """HOST:PORT,... of an etcd cluster that keeps the job's store; empty: none.

    With etcd any node may be lost. Needs torchrun's --rdzv-id.
    """

    stop_save_s: float
    """Seconds that windows may take from memory to disk when the job is asked to stop.

    SIGTERM, SIGUSR1 or a notice asks the job to stop. 0: the job ends at once. torchrun
    kills its processes after 30 s.
    """

    notice_file: str
    """File whose appearance asks the job to save and stop; empty: none.

    The supervisor looks for the file once a second.
    """

    spare_nodes: int
    """Number of nodes, of torchrun's --nnodes, that wait until another node is lost."""

    node_s: float
    """Seconds without a sign of life after which a node counts as lost.

    For jobs with spare nodes. Must be longer than any pause of a healthy node. A node
    whose processes have ended counts as lost at once.
    """

    suspect_iters: int
    """Iterations after a load in which a loss that is not finite marks the load as bad.

    0: no load is marked.
    """

    on_divergence: str
    """Action if a replay does not reproduce a healthy rank's state, one of
    `DIVERGENCES`.
    """

    replace_on: list[str]
    """Patterns of `type: message` of exceptions that a replacement repairs.

    CUDA, NCCL, ECC and I/O errors need no pattern.
    """

    end_on: list[str]
    """Patterns of exceptions that end the job; these come before `replace_on`."""

    shared_memory: str
    """Folder in memory in which snapshots outlive their worker.

    A start with less room than the forecast is an error.
    """

    def __post_init__(self) -> None:
        require_switch("runtime.guard", self.guard)
        require_switch("runtime.standby", self.standby)
        require_choice("runtime.backend", self.backend, BACKENDS)
        ten_beats_s = 0.5
        require_all_at_least(
            "runtime.", self, heartbeat_s=ten_beats_s, progress_s=self.heartbeat_s
        )
        require_all_at_least(
            "runtime.", self, form_s=1, abort_s=1, copy_s=1, max_deaths=1, health_s=1
        )
        require_all_at_least(
            "runtime.", self, grace_s=0, sick_deaths=0, sick_within_s=0
        )
        require_all_at_least("runtime.", self, stop_save_s=0, suspect_iters=0)
        require_all_at_least("runtime.", self, spare_nodes=0, node_s=1)
        wanted = (
            f"less than half of runtime.join_s={self.join_s:g}: survivors wait twice"
            " runtime.node_s for a spare node before they save"
        )
        # without spare nodes nothing uses `node_s`, and a short `join_s` is fine
        is_unused = not self.spare_nodes
        require(
            is_unused or 2 * self.node_s < self.join_s,
            "runtime.node_s",
            self.node_s,
            wanted,
        )
        require_choice("runtime.sick_place", self.sick_place, SICK_PLACES)
        if self.etcd:
            parse_endpoints("runtime.etcd", self.etcd)
        require_choice("runtime.on_divergence", self.on_divergence, DIVERGENCES)
        require_patterns("runtime.replace_on", self.replace_on)
        require_patterns("runtime.end_on", self.end_on)
        wanted = (
            f"more than runtime.progress_s={self.progress_s:g}: others may compute for"
            " so long"
        )
        require(
            self.operation_s > self.progress_s,
            "runtime.operation_s",
            self.operation_s,
            wanted,
        )
        wanted = (
            "more than runtime.progress_s + runtime.form_s ="
            f" {self.progress_s + self.form_s:g}"
        )
        require(
            self.join_s > self.progress_s + self.form_s,
            "runtime.join_s",
            self.join_s,
            wanted,
        )
        wanted = (
            f"less than runtime.join_s={self.join_s:g}: survivors wait for the"
            " replacement"
        )
        require(self.health_s < self.join_s, "runtime.health_s", self.health_s, wanted)
        wanted = f"less than runtime.heartbeat_s={self.heartbeat_s:g}"
        require(
            self.grace_s < self.heartbeat_s, "runtime.grace_s", self.grace_s, wanted
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolderConfig:
    """Settings of the run folder."""

    dir: str | None
    """Path of the run folder; None: a new folder, outputs/DATE/TIME-`name`."""

    name: str
    """Last part of the name of a new folder."""

    configuration: str
    """Text of config.yaml."""

    def __post_init__(self) -> None:
        # the path goes into JSON and to the other ranks; a relative path contains the
        # working directory
        path = os.path.realpath(self.dir or ".")
        require(is_utf8(path), "run.dir", path, "a path in UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckConfig:
    """Settings `run.*` for a run that another run is compared with.

    `moe-ckpt prove` sets these.
    """

    digest_every_iters: int
    """Iterations between digests of the state in the event files; 0: none."""

    digest_tensors: bool
    """Whether a digest of each tensor is logged with each digest of the state."""

    leave_out: str
    """Ingredient that recoveries of a control run lack: `nothing` or `moments`."""

    def __post_init__(self) -> None:
        require_at_least("run.digest_every_iters", self.digest_every_iters, 0)
        require_choice("run.leave_out", self.leave_out, ["nothing", "moments"])


NO_CHECKS = CheckConfig(digest_every_iters=0, digest_tensors=False, leave_out="nothing")
"""No digests, and complete recoveries."""


CkptConfig = NoneConfig | DenseConfig | InMemoryConfig
CKPT_CONFIGS: dict[str, type[CkptConfig]] = {
    "none": NoneConfig,
    "dense": DenseConfig,
    "moevement": MoevementConfig,
    "gemini": GeminiConfig,
    "checkfreq": CheckfreqConfig,
    "moc": MocConfig,
    "moetion": MoetionConfig,
    "flowcheck": FlowcheckConfig,
}
"""The configuration class of each policy, by the policy's name."""


def wants_supervisor(ckpt: CkptConfig, runtime: RuntimeConfig) -> bool:
    """Return whether ranks are supervised.

    With `runtime.guard` auto, ranks are supervised if the policy recovers a lost rank
    from memory.
    """
    return is_on(runtime.guard, by_default=ckpt.in_memory is not None)
