"""The keys `ckpt.*` of a configuration whose class is composed of sections.

YAML files and command lines have one flat list of keys for each policy; the classes of
`moe_ckpt.config` share sections, such as the copies on other nodes:

    ckpt.replicas, ckpt.tls.key    <->    config.replication.replicas, .replication.tls
    ckpt.disk_path                 <->    config.disk.path

All conversions between the two are here. Pure. Must not: check values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, make_dataclass
from typing import Any, TypeVar, cast, get_type_hints

from moe_ckpt.config import EverySnapshotToDisk, LocalDiskConfig, ReplicationConfig

T = TypeVar("T")

_PREFIXES: Mapping[Any, str] = {
    ReplicationConfig: "",
    LocalDiskConfig: "disk_",
    EverySnapshotToDisk: "disk_",
}
"""Text before the keys of each section whose keys stand beside those of the policy."""


def keys_of(kind: type[Any]) -> dict[str, Any]:
    """Return the type of each key of a configuration, by key.

    Fields that a policy fixes (`init=False`) are no keys. A dataclass that is no
    section of `_PREFIXES` is the type of one key, which has keys of its own.

    Args:
        kind: The class of the configuration.

    Example:
        keys_of(MocConfig)["disk_path"]  # str | None
    """
    keys: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if hint in _PREFIXES:
            keys |= {_PREFIXES[hint] + key: each for key, each in _hints(hint).items()}
        else:
            keys[name] = hint
    return keys


def flat_class(kind: type[Any]) -> type[Any]:
    """Return a dataclass that has the keys of a configuration as its fields.

    Args:
        kind: The class of the configuration; the result if no keys are in sections.
    """
    if any(hint in _PREFIXES for hint in _hints(kind).values()):
        return make_dataclass(kind.__name__, keys_of(kind).items())
    return kind


def from_keys(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return the configuration that has these values.

    Args:
        kind: The class of the configuration.
        values: A value of each key of `keys_of`.

    Raises:
        ConfigError: A value is not allowed.
    """
    arguments: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        if hint in _PREFIXES:
            of_section = {key: values[_PREFIXES[hint] + key] for key in _hints(hint)}
            arguments[name] = hint(**of_section)
        else:
            arguments[name] = values[name]
    return kind(**arguments)


def to_keys(config: object) -> dict[str, Any]:
    """Return the values of a configuration as YAML has the values, by key.

    Args:
        config: The configuration, a dataclass.
    """
    keys, values = {}, asdict(cast("Any", config))
    for name, hint in _hints(type(config)).items():
        if hint in _PREFIXES:
            section = values[name]
            keys |= {_PREFIXES[hint] + key: section[key] for key in _hints(hint)}
        else:
            keys[name] = values[name]
    return keys


def _hints(kind: Any) -> dict[str, Any]:
    """Return the type of each field that a constructor takes."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if each.init}
