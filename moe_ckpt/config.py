"""Settings of each checkpoint policy as plain values. Knows no Hydra; every check names
the setting.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from moe_ckpt.errors import ConfigError

AUTO = "auto"
"""The value of settings that the project chooses itself."""


def require(condition: bool, setting: str, got: object, wanted: str) -> None:
    """Raise ConfigError naming the setting, its value and its allowed values, unless
    the condition holds.
    """
    if not condition:
        raise ConfigError(f"{setting}: got {got!r}, wanted {wanted}")


def is_utf8(text: str) -> bool:
    """Return whether a text can be written in UTF-8: a file name of other bytes cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def require_choice(setting: str, got: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless `got` is one of `choices`."""
    require(got in choices, setting, got, "one of " + ", ".join(choices))


def require_at_least(setting: str, got: float, least: float) -> None:
    """Raise ConfigError unless `got` is at least `least`."""
    require(got >= least, setting, got, f"at least {least}")


def require_all_at_least(prefix: str, values: object, **least: float) -> None:
    """Raise ConfigError unless each of these settings is at least so much, or null;
    `prefix` comes before names.
    """
    for name, number in least.items():
        got = getattr(values, name)
        if got is not None:
            require_at_least(f"{prefix}{name}", got, number)


def require_auto(
    setting: str, got: int | str, least: int, what: str = "a number of iterations"
) -> None:
    """Raise ConfigError unless `got` is auto or a number of at least `least`."""
    valid = got == AUTO or (isinstance(got, int) and got >= least)
    require(valid, setting, got, f"auto or {what} of at least {least}")


def require_switch(setting: str, got: bool | str) -> None:
    """Raise ConfigError unless `got` is true, false or auto."""
    require(got in (True, False, AUTO), setting, got, f"{AUTO}, true or false")


def is_on(switch: bool | str, *, by_default: bool) -> bool:
    """Return whether a setting of `require_switch` is on; auto: if it is so by default."""
    return by_default if switch == AUTO else bool(switch)


def require_patterns(setting: str, patterns: Sequence[str]) -> None:
    """Raise ConfigError, naming the setting, for a pattern that is no regular
    expression.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            require(False, setting, pattern, f"regular expressions ({error})")


def parse_endpoints(setting: str, text: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a text `HOST:PORT,HOST:PORT`. Raises ConfigError,
    naming the setting.
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
    """A policy's name, and the answers of most policies to questions of the engine and
    the launcher.
    """

    policy: str

    # stages that lost no state keep theirs while others replay
    recovers_locally: ClassVar[bool] = False
    # a snapshot has some experts only: after a rollback the others are older
    loses_tokens: ClassVar[bool] = False
    # the policy chooses experts by their tokens, which ranks then count
    asks_popularity: ClassVar[bool] = False
    # peers are ranks of the same pipeline stage
    copies_within_stage: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # for configurations that programs build: the launcher and `moe_ckpt.run` choose
        # the class by the policy
        require_choice(
            "ckpt.policy",
            self.policy,
            [name for name, kind in CKPT_CONFIGS.items() if kind is type(self)],
        )

    @property
    def in_memory(self) -> InMemoryConfig | None:
        """These settings if the policy keeps snapshots in host memory, and lives
        through the loss of ranks.
        """
        return None

    @property
    def served(self) -> FlowcheckConfig | None:
        """These settings if checkpoint servers take the optimizer's steps."""
        return None

    @property
    def waits_for_disk(self) -> bool:
        """Whether every snapshot is on disk before the next one is taken."""
        return False

    @property
    def copies_in_bubbles(self) -> bool:
        """Whether copies to host memory wait for pipeline bubbles."""
        return False

    @property
    def capacity_boost(self) -> float:
        """The share by which experts with lost tokens get more capacity; 0: routers
        stay as they are.
        """
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoneConfig(PolicyConfig):
    """`ckpt=none`: saves nothing; a fault restarts from the beginning."""

    keep: ClassVar[int] = 1
    async_save: ClassVar[bool] = False
    strict: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class SavingConfig(PolicyConfig):
    """The settings of all policies that save: whole checkpoints in Megatron's
    dist_checkpointing format.
    """

    keep: int
    async_save: bool
    strict: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaxBytesPerS:
    """`ckpt.max_bytes_per_s`: caps on the copies of each rank, in bytes a second; None:
    no cap.

    The caps apply to snapshots to host memory, to snapshots to all peers together, and
    to blobs to the local disk. Recoveries, step logs and whole checkpoints have no cap,
    nor have boundary logs, whose copies keep buffers of the accelerator in use.
    """

    host: float | None
    peers: float | None
    disk: float | None

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsConfig:
    """`ckpt.tls`: the PEM files of a node for TLS between replica daemons; all None:
    copies cross the network in clear.

    `authority` signs the certificates of all nodes. A run checks the files as it
    starts.
    """

    certificate: str | None
    key: str | None
    authority: str | None

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


@dataclass(frozen=True, kw_only=True)
class DenseConfig(SavingConfig):
    """`ckpt=dense`: the whole state, durable, in Megatron's dist_checkpointing format."""

    every_iters: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.every_iters", self.every_iters, 1)


@dataclass(frozen=True, kw_only=True)
class HostMemoryConfig(SavingConfig):
    """The settings of all policies that keep snapshots in host memory, and live through
    the loss of ranks.
    """

    memory_budget_bytes: int | None
    durable_every_iters: int

    @property
    def in_memory(self) -> InMemoryConfig:
        return cast("InMemoryConfig", self)  # all policies below are among them

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.in_memory
        require_all_at_least("ckpt.", config, durable_every_iters=0, disk_every_iters=0)
        require_all_at_least(
            "ckpt.", config, memory_budget_bytes=1, disk_budget_bytes=1
        )
        require_auto("ckpt.replicas", config.replicas, 0, "a number of copies")
        capped = config.max_bytes_per_s.peers
        wanted = "null where ckpt.replicas=0: nothing is copied to peers"
        require(
            capped is None or config.replicas != 0,
            "ckpt.max_bytes_per_s.peers",
            capped,
            wanted,
        )


@dataclass(frozen=True, kw_only=True)
class MoevementConfig(HostMemoryConfig):
    """`ckpt=moevement`: sparse snapshots in host memory every iteration, localized
    recovery (MoEvement, section 3).
    """

    window: int | str
    pause_iters: int | str
    mtbf_s: float
    overhead: float
    profile_iters: int
    window_drift: float
    paper_exact: bool
    popularity: str
    popularity_decay: float
    reorder_change: float
    reorder_share: float
    boundary_log: bool
    keep_windows: int
    replicas: int | str
    network_interface: str | None
    tls: TlsConfig
    disk_every_iters: int
    disk_path: str | None
    disk_budget_bytes: int | None
    max_bytes_per_s: MaxBytesPerS

    recovers_locally: ClassVar[bool] = True
    asks_popularity: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
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
        )
        require_choice("ckpt.popularity", self.popularity, ["hard", "soft", "decayed"])
        for name in ("popularity_decay", "reorder_share"):
            require(
                0.0 <= getattr(self, name) <= 1.0,
                f"ckpt.{name}",
                getattr(self, name),
                "between 0 and 1",
            )


@dataclass(frozen=True, kw_only=True)
class RollbackConfig(HostMemoryConfig):
    """The settings of policies under which all ranks go back to the newest snapshot
    after a fault.
    """

    # all stages go back together: no stage replays from its neighbours' logs
    boundary_log: ClassVar[bool] = False
    keep_windows: ClassVar[int] = 1
    # the account of lost tokens is exact: whole tokens, no probabilities, no decay
    popularity: ClassVar[str] = "hard"
    popularity_decay: ClassVar[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class WholeSnapshotsConfig(RollbackConfig):
    """The settings of policies that take the whole state into host memory every few
    iterations.
    """

    every_iters: int | str
    profile_iters: int
    interval_drift: float
    disk_path: str | None
    disk_budget_bytes: int | None
    max_bytes_per_s: MaxBytesPerS

    @property
    def waits_for_disk(self) -> bool:
        return self.in_memory.disk_every_iters == 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_auto("ckpt.every_iters", self.every_iters, 1)
        require_all_at_least("ckpt.", self, profile_iters=2, interval_drift=0)


@dataclass(frozen=True, kw_only=True)
class GeminiConfig(WholeSnapshotsConfig):
    """`ckpt=gemini`: snapshots in own and peers' host memory, as often as is best for
    an MTBF (Gemini).
    """

    mtbf_s: float
    replicas: int | str
    network_interface: str | None
    tls: TlsConfig
    disk_every_iters: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mtbf_s > 0, "ckpt.mtbf_s", self.mtbf_s, "more than 0")


@dataclass(frozen=True, kw_only=True)
class CheckfreqConfig(WholeSnapshotsConfig):
    """`ckpt=checkfreq`: snapshots in host memory and from there on disk, as often as a
    cap allows (CheckFreq).
    """

    overhead: float

    replicas: ClassVar[int] = 0
    network_interface: ClassVar[None] = None
    tls: ClassVar[TlsConfig] = NO_TLS
    # CheckFreq brings each snapshot to storage before it takes the next one
    disk_every_iters: ClassVar[int] = 1

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
    """The settings of policies that take some experts into host memory; a rollback
    loses tokens.
    """

    every_iters: int
    disk_every_iters: int
    disk_path: str | None
    disk_budget_bytes: int | None
    max_bytes_per_s: MaxBytesPerS

    loses_tokens: ClassVar[bool] = True
    asks_popularity: ClassVar[bool] = True
    profile_iters: ClassVar[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("ckpt.every_iters", self.every_iters, 1)


@dataclass(frozen=True, kw_only=True)
class MocConfig(PartialConfig):
    """`ckpt=moc`: some experts of each layer to host memory, some of those to storage
    (MoC-System).
    """

    k_snapshot: int | str
    k_persist: int
    selection: str
    partial: str
    dynamic_k: bool
    plt_limit: float

    replicas: ClassVar[int] = 0
    network_interface: ClassVar[None] = None
    tls: ClassVar[TlsConfig] = NO_TLS

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
    """`ckpt=moetion`: the experts with the most tokens at risk, within budgets of each
    link (MoEtion).
    """

    experts: int | str
    remote_experts: int | str
    send_gradients: bool
    bubble_copies: bool
    boost: float
    replicas: int | str
    network_interface: str | None
    tls: TlsConfig

    copies_within_stage: ClassVar[bool] = True
    partial: ClassVar[str] = "both"  # experts in snapshots are whole

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
    """`ckpt=flowcheck`: checkpoint servers take the optimizer's steps from gradients,
    every iteration (FlowCheck).
    """

    capture: str
    mirror_interface: str | None
    captures: int
    capture_loss: float
    max_lag_iters: int
    servers: str
    server_hosts: int
    server_wait_s: float
    replicas: int | str
    network_interface: str | None
    tls: TlsConfig

    profile_iters: ClassVar[int] = 0
    disk_every_iters: ClassVar[int] = 0
    disk_path: ClassVar[None] = None
    disk_budget_bytes: ClassVar[None] = None
    # no caps: a server that receives gradients late gets a whole snapshot instead,
    # which is more bytes
    max_bytes_per_s: ClassVar[MaxBytesPerS] = NO_CAPS

    @property
    def served(self) -> FlowcheckConfig:
        return self

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
        """The servers on such machines that hold each rank's state."""
        return 1 + (
            min(1, self.server_hosts - 1)
            if self.replicas == AUTO
            else int(self.replicas)
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("ckpt.capture", self.capture, ["tap", "mirror"])
        # one capture lacks a share of every gradient
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
        require(fits, "ckpt.replicas", self.replicas, wanted)


InMemoryConfig = (
    MoevementConfig
    | GeminiConfig
    | CheckfreqConfig
    | MocConfig
    | MoetionConfig
    | FlowcheckConfig
)
"""Policies that keep snapshots in host memory, and live through the loss of ranks."""

DIVERGENCES = ("window", "end")
"""If a replay does not reproduce a healthy rank's state, all ranks go on from the
window, or end.
"""

SICK_PLACES = ("end", "leave")
"""A node that is sick ends the job, or leaves it to a spare node
(`runtime.sick_place`).
"""

BACKENDS = (AUTO, "nccl", "gloo", "staged")
"""Libraries that move bytes between ranks: `staged` is gloo for a GPU's tensors, by way
of host memory.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """How a job lives through the death of its processes: conf/runtime/default.yaml has
    the rule for each time.
    """

    guard: bool | str
    backend: str
    share_gpus: bool
    heartbeat_s: float
    progress_s: float
    form_s: float
    operation_s: float
    abort_s: float
    join_s: float
    grace_s: float
    copy_s: float
    max_deaths: int
    sick_deaths: int
    sick_within_s: float
    health: str
    health_s: float
    sick_place: str
    etcd: str
    stop_save_s: float
    notice_file: str
    suspect_iters: int
    on_divergence: str
    replace_on: list[str]
    end_on: list[str]
    shared_memory: str

    def __post_init__(self) -> None:
        require_switch("runtime.guard", self.guard)
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
    """The run folder's settings. `dir` None: a new one, outputs/DATE/TIME-`name`.

    `configuration`: the text of config.yaml.
    """

    dir: str | None
    name: str
    configuration: str

    def __post_init__(self) -> None:
        # the path goes into JSON, and to the other ranks; the working directory is a
        # part of a relative one
        path = os.path.realpath(self.dir or ".")
        require(is_utf8(path), "run.dir", path, "a path in UTF-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckConfig:
    """The part of a run that another run is compared with: the settings `run.*` that
    `moe-ckpt prove` sets.

    `digest_every_iters`: iterations between digests of the state in the event files, 0:
    none; `digest_tensors`: with a digest of each tensor; `leave_out`: the ingredient
    that recoveries of a control run lack.
    """

    digest_every_iters: int
    digest_tensors: bool
    leave_out: str

    def __post_init__(self) -> None:
        require_at_least("run.digest_every_iters", self.digest_every_iters, 0)
        require_choice("run.leave_out", self.leave_out, ["nothing", "moments"])


NO_CHECKS = CheckConfig(digest_every_iters=0, digest_tensors=False, leave_out="nothing")


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


def wants_supervisor(ckpt: CkptConfig, runtime: RuntimeConfig) -> bool:
    """Return whether ranks are supervised: by default if the policy recovers a lost
    rank from memory.
    """
    return is_on(runtime.guard, by_default=ckpt.in_memory is not None)
