"""Keys of YAML files and the sections of a policy's configuration, in both directions.

A policy without a section fixes its values, and refuses its keys.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ckpt.config import (
    CKPT_CONFIGS,
    NO_CAPS,
    NO_DISK,
    NO_REPLICATION,
    NO_TLS,
    CheckfreqConfig,
    EverySnapshotToDisk,
    FlowcheckConfig,
    HostMemoryConfig,
    LocalDiskConfig,
    MaxBytesPerS,
    MocConfig,
    MoevementConfig,
    ReplicationConfig,
    RuntimeConfig,
    TlsConfig,
)
from moe_ckpt.config_keys import flat_class, from_keys, keys_of, to_keys
from moe_ckpt.errors import ConfigError
from moe_ckpt.run_settings import ckpt_config, runtime_config
from tests.loop_configs import loop_config

CERTIFICATES = {"certificate": "a.pem", "key": "a.key", "authority": "all.pem"}
CAPS = {"host": 1e9, "peers": 2e9, "disk": 3e9}
OTHERS: dict[str, Any] = {
    "replicas": 2,
    "network_interface": "eth1",
    "tls": CERTIFICATES,
    "disk_every_iters": 7,
    "disk_path": "/local",
    "disk_budget_bytes": 1000,
    "max_bytes_per_s": CAPS,
}
"""A value of each key that several policies share, other than its default."""

LACKING = {
    "none": OTHERS.keys(),
    "dense": OTHERS.keys(),
    "checkfreq": ("replicas", "network_interface", "tls", "disk_every_iters"),
    "moc": ("replicas", "network_interface", "tls"),
    "flowcheck": (
        *("disk_every_iters", "disk_path", "disk_budget_bytes"),
        "max_bytes_per_s",
    ),
}
"""Those of the keys that a policy does not have."""

WITH_SECTIONS = [
    name for name, kind in CKPT_CONFIGS.items() if issubclass(kind, HostMemoryConfig)
]


def changes_of(policy: str) -> dict[str, Any]:
    changes = {
        key: value
        for key, value in OTHERS.items()
        if key not in LACKING.get(policy, ())
    }
    if policy in ("checkfreq", "moc"):
        # nothing is copied to peers
        changes["max_bytes_per_s"] = CAPS | {"peers": None}
    if policy == "flowcheck":
        # as each server is on a host of its own
        changes |= {"servers": "hosts", "server_hosts": 3}
    return changes


@pytest.mark.parametrize("policy", CKPT_CONFIGS)
def test_keys_become_sections_and_keys_again(policy: str) -> None:
    changes = changes_of(policy)
    config = ckpt_config(policy, **changes)
    keys = to_keys(config)
    assert list(keys) == list(keys_of(CKPT_CONFIGS[policy]))
    assert keys == to_keys(ckpt_config(policy)) | changes
    assert ckpt_config(**keys) == config


def test_each_key_reaches_its_field() -> None:
    config = ckpt_config("moevement", **OTHERS)
    assert isinstance(config, MoevementConfig)
    assert config.replication == ReplicationConfig(
        replicas=2, network_interface="eth1", tls=TlsConfig(**CERTIFICATES)
    )
    assert config.disk == LocalDiskConfig(
        every_iters=7, path="/local", budget_bytes=1000
    )
    assert config.max_bytes_per_s == MaxBytesPerS(**CAPS)


@pytest.mark.parametrize(
    ("policy", "key"), [(policy, key) for policy in LACKING for key in LACKING[policy]]
)
def test_a_policy_without_a_setting_refuses_the_key(policy: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ckpt\.{key}: no such setting, wanted "):
        ckpt_config(policy, **{key: OTHERS[key]})
    assert key not in keys_of(CKPT_CONFIGS[policy])


@pytest.mark.parametrize("policy", WITH_SECTIONS)
@pytest.mark.parametrize("name", ["replication", "disk", "path", "budget_bytes"])
def test_a_section_is_no_key(policy: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ckpt\.{name}: no such setting"):
        ckpt_config(policy, **{name: {}})


def test_settings_that_a_policy_lacks_are_fixed() -> None:
    checkfreq, moc = ckpt_config("checkfreq"), ckpt_config("moc")
    flowcheck = ckpt_config("flowcheck")
    assert isinstance(checkfreq, CheckfreqConfig)
    assert isinstance(moc, MocConfig)
    assert isinstance(flowcheck, FlowcheckConfig)
    assert checkfreq.replication == moc.replication == NO_REPLICATION
    assert (checkfreq.disk.every_iters, checkfreq.waits_for_disk) == (1, True)
    assert (flowcheck.disk, flowcheck.max_bytes_per_s) == (NO_DISK, NO_CAPS)
    with pytest.raises(TypeError, match="replication"):
        MocConfig(**{**vars(moc), "replication": NO_REPLICATION})
    with pytest.raises(TypeError, match="every_iters"):
        EverySnapshotToDisk(every_iters=2, path=None, budget_bytes=None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            lambda: ReplicationConfig(replicas=-1, network_interface=None, tls=NO_TLS),
            r"ckpt\.replicas: got -1, wanted auto or a number of copies of at least 0",
        ),
        (
            lambda: replace(NO_DISK, every_iters=-1),
            r"ckpt\.disk_every_iters: got -1, wanted at least 0",
        ),
        (
            lambda: EverySnapshotToDisk(path=None, budget_bytes=0),
            r"ckpt\.disk_budget_bytes: got 0, wanted at least 1",
        ),
    ],
)
def test_a_value_in_a_section_is_named_by_its_key(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        section()


def test_a_class_without_sections_has_its_fields_as_keys() -> None:
    runtime = runtime_config()
    assert flat_class(RuntimeConfig) is RuntimeConfig
    assert to_keys(runtime) == asdict(runtime)
    assert from_keys(RuntimeConfig, to_keys(runtime)) == runtime


@pytest.mark.parametrize("policy", CKPT_CONFIGS)
def test_the_run_folder_of_an_own_loop_has_the_keys(policy: str) -> None:
    written = yaml.safe_load(loop_config(policy).job.folder.configuration)["ckpt"]
    path = Path(__file__).parents[1] / "conf" / "ckpt" / f"{policy}.yaml"
    assert written == yaml.safe_load(path.read_text())
