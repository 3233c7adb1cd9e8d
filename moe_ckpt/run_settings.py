"""The command line of `python -m moe_ckpt.run`, as plain values.

Defaults of each policy and of the runtime are those of conf/ckpt and conf/runtime; a
file of --config, then each --set, replaces single keys. Pure but for reading YAML
files. Must not: know Hydra, or import torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from moe_ckpt.arguments import Parser, parse_before_program
from moe_ckpt.cli import app_root
from moe_ckpt.config import (
    AUTO,
    CKPT_CONFIGS,
    NO_CHECKS,
    CheckConfig,
    CkptConfig,
    RunFolderConfig,
    RuntimeConfig,
    is_utf8,
    require,
    require_choice,
    require_switch,
)
from moe_ckpt.config_keys import from_keys, keys_of
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.job_config import JobConfig
from moe_ckpt.loop_names import LOOP_MODULES

T = TypeVar("T")

_DESCRIPTION = (
    "Runs a script of Megatron-LM, Megatron-Bridge or ms-swift, unchanged, with"
    " fault tolerance.\n\n"
    "    torchrun --nproc-per-node=N -m moe_ckpt.run [OPTIONS] -- SCRIPT ARGUMENTS"
)
_DEFAULT_POLICY, _DEFAULT_LOOP = "moevement", "megatron-lm"
_SECTIONS = ("ckpt", "runtime", "parallel", "run")
_CHECKS = get_type_hints(CheckConfig)
_OWN_KEYS = {
    "parallel": ("ranks_per_node",),
    "run": (
        "dir",
        "exactness",
        "lose",
        "keep_batches_bytes",
        "check_determinism",
        *_CHECKS,
    ),
}
_KEEP_BATCHES_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """The program that trains."""

    name: str
    """Path of a script, or name of a module."""

    is_module: bool
    """Whether the program is a module."""

    arguments: tuple[str, ...]
    """Arguments of the program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """One attached run of a training loop."""

    command: Command
    """The program that trains."""

    job: JobConfig
    """The settings of the job."""

    is_plain: bool = False
    """Whether the run has no attachment."""

    loop: str = _DEFAULT_LOOP
    """The training loop, one of `LOOP_MODULES`."""

    keep_batches_bytes: int = _KEEP_BATCHES_BYTES
    """Limit on kept batches of an iterator without random access, in bytes.

    A rank keeps these batches in host memory.
    """

    def __post_init__(self) -> None:
        require(
            self.keep_batches_bytes >= 1,
            "run.keep_batches_bytes",
            self.keep_batches_bytes,
            "a number of bytes",
        )
        guard, refused = self.job.runtime.guard, self.is_plain
        wanted = (
            "auto or false with --plain and --ckpt none"
            if self.is_plain
            else "auto or true: --plain is without"
        )
        require(guard is not refused, "runtime.guard", guard, wanted)
        spare_nodes = self.job.runtime.spare_nodes if self.is_plain else 0
        wanted = "0 without supervisors: a spare node would train with --plain"
        require(not spare_nodes, "runtime.spare_nodes", spare_nodes, wanted)
        standby = self.job.runtime.standby if self.is_plain else False
        wanted = "auto or false with --plain, which is without supervisors"
        require(standby is not True, "runtime.standby", standby, wanted)


def parse_run(arguments: Sequence[str]) -> RunSettings:
    """Return the run that a command line describes.

    Raises:
        ConfigError: An argument or a setting cannot work; the message names it.
    """
    parsed, command = parse_options(arguments)
    changes = _merged(
        _read_file(parsed.config), *(_assignment(text) for text in parsed.set)
    )
    policy = parsed.ckpt or changes["ckpt"].pop("policy", _DEFAULT_POLICY)
    loop = parsed.loop or _DEFAULT_LOOP
    require_choice("--loop", loop, list(LOOP_MODULES))
    require_choice("--ckpt", policy, list(CKPT_CONFIGS))
    ckpt = _merged_section(
        _read_defaults("ckpt", policy), {**changes["ckpt"], "policy": policy}
    )
    runtime = _merged_section(_read_defaults("runtime", "default"), changes["runtime"])
    for name, known in _OWN_KEYS.items():
        for key in changes[name]:
            _require_known(f"{name}.{key}", key, known)
    run = changes["run"]
    checks = {
        key: _converted(run[key], kind, f"run.{key}")
        for key, kind in _CHECKS.items()
        if key in run
    }
    require_switch("run.check_determinism", run.get("check_determinism", AUTO))
    configuration = yaml.safe_dump(
        {**changes, "ckpt": ckpt, "runtime": runtime}, sort_keys=False
    )
    job = JobConfig(
        ckpt=section_of(CKPT_CONFIGS[policy], "ckpt", ckpt),
        runtime=section_of(RuntimeConfig, "runtime", runtime),
        folder=RunFolderConfig(
            dir=_converted(run.get("dir"), str | None, "run.dir"),
            name=policy,
            configuration=configuration,
        ),
        ranks_per_node=changes["parallel"].get("ranks_per_node", AUTO),
        checks=replace(NO_CHECKS, **checks),
        losses=tuple(_converted(run.get("lose", []), list[StateLoss], "run.lose")),
        exactness=run.get("exactness", AUTO),
        check_determinism=run.get("check_determinism", AUTO),
    )
    kept_bytes = run.get("keep_batches_bytes", _KEEP_BATCHES_BYTES)
    return RunSettings(
        command=_command(command),
        loop=loop,
        job=job,
        is_plain=parsed.plain or policy == "none",
        keep_batches_bytes=_converted(kept_bytes, int, "run.keep_batches_bytes"),
    )


def ckpt_config(policy: str, **changes: Any) -> CkptConfig:
    """Return a policy's configuration: the defaults of its file, with these changes.

    Args:
        policy: Name of the policy.
        **changes: Values of keys.

    Raises:
        ConfigError: The policy, a key or a value is unknown.

    Example:
        config = ckpt_config("moevement", window=4)
    """
    require_choice("ckpt.policy", policy, list(CKPT_CONFIGS))
    return section_of(
        CKPT_CONFIGS[policy],
        "ckpt",
        _merged_section(_read_defaults("ckpt", policy), changes),
    )


def runtime_config(**changes: Any) -> RuntimeConfig:
    """Return the runtime's configuration: the defaults of its file, with these changes.

    Args:
        **changes: Values of keys.

    Raises:
        ConfigError: A key is unknown, or a value cannot work.

    Example:
        config = runtime_config(heartbeat_s=20.0)
    """
    return section_of(
        RuntimeConfig,
        "runtime",
        _merged_section(_read_defaults("runtime", "default"), changes),
    )


def section_of(kind: type[T], name: str, values: Mapping[str, Any]) -> T:
    """Return values as a dataclass.

    Args:
        kind: The dataclass.
        name: Name of the section, for messages.
        values: The value of each key.

    Raises:
        ConfigError: A key is unknown or missing, or a value has another type.
    """
    known = keys_of(kind)
    for key in values:
        _require_known(f"{name}.{key}", key, list(known))
    for key in known:
        require(key in values, f"{name}.{key}", "nothing", "a value")
    return from_keys(
        kind,
        {
            key: _converted(values[key], hint, f"{name}.{key}")
            for key, hint in known.items()
        },
    )


def parse_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `moe_ckpt.run`, and the words of the program.

    Raises:
        ConfigError: An unknown option, or an option without its value.
    """
    parser = Parser(prog="python -m moe_ckpt.run", description=_DESCRIPTION)
    add_run_options(parser)
    return parse_before_program(parser, arguments)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moe_ckpt.run` to a parser."""
    add = parser.add_argument
    add(
        "--ckpt",
        metavar="POLICY",
        help=f"{', '.join(CKPT_CONFIGS)} (default: {_DEFAULT_POLICY})",
    )
    add("--loop", help=f"{', '.join(LOOP_MODULES)} (default: {_DEFAULT_LOOP})")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting: window=4, runtime.join_s=60",
    )
    add(
        "--config",
        metavar="FILE",
        help=f"a YAML file with sections {', '.join(_SECTIONS)}",
    )
    add(
        "--plain",
        action="store_true",
        help="without supervisors and attachment, for comparison",
    )


def run_words(options: argparse.Namespace) -> list[str]:
    """Return the parsed options of `moe_ckpt.run` as words."""
    words = [
        f"--{name}={getattr(options, name)}"
        for name in ("loop", "ckpt", "config")
        if getattr(options, name)
    ]
    words += [f"--set={text}" for text in options.set]
    return [*words, "--plain"] if options.plain else words


def _command(words: Sequence[str]) -> Command:
    require(
        bool(words),
        "SCRIPT",
        "nothing",
        "the program that trains: [OPTIONS] -- SCRIPT ARGUMENTS",
    )
    is_module = words[0] == "-m"
    require(not is_module or len(words) > 1, "-m", "nothing", "the name of a module")
    name, *arguments = words[1:] if is_module else words
    return Command(name=name, is_module=is_module, arguments=tuple(arguments))


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--config: got {path!r}, wanted a YAML file ({error})"
        ) from error
    valid = isinstance(values, dict) and all(
        isinstance(section, dict) for section in values.values()
    )
    require(
        valid, "--config", path, f"a file with sections of keys: {', '.join(_SECTIONS)}"
    )
    return values


def _read_defaults(group: str, name: str) -> dict[str, Any]:
    path = (app_root() / "conf") / group / f"{name}.yaml"
    require(
        path.is_file(),
        "moe_ckpt.run: defaults",
        str(path),
        "the folder conf/ beside the package",
    )
    return yaml.safe_load(path.read_text())


def _assignment(text: str) -> dict[str, Any]:
    """Return KEY=VALUE as nested sections; a KEY without a section is one of `ckpt`."""
    require(is_utf8(text), "--set", text, "a text in UTF-8")
    key, equals, value = text.partition("=")
    require(
        bool(equals and key),
        "--set",
        text,
        "KEY=VALUE, such as window=4 or runtime.join_s=60",
    )
    words = key.split(".")
    path = words if words[0] in _SECTIONS else ["ckpt", *words]
    require(
        len(path) > 1, "--set", text, "a key in the section, such as runtime.join_s=60"
    )
    # an empty value is an empty text; YAML would read null
    nested: Any = yaml.safe_load(value) if value else value
    for word in reversed(path):
        nested = {word: nested}
    return nested


def _merged(*changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for change in changes:
        for name, section in change.items():
            _require_known(name, name, _SECTIONS)
            merged[name] = _merged_section(merged[name], section)
    return merged


def _merged_section(
    values: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged_section(merged[key], value) if both else value
    return merged


def _require_known(setting: str, key: str, known: Sequence[str]) -> None:
    if key not in known:
        close = difflib.get_close_matches(key, known)
        wanted = " or ".join(close) if close else "one of " + ", ".join(sorted(known))
        raise ConfigError(f"{setting}: no such setting, wanted {wanted}")


def _converted(value: Any, hint: Any, setting: str) -> Any:
    """Return a YAML value as the type of a field.

    Raises:
        ConfigError: The value has another type.
    """
    if is_dataclass(hint):
        require(isinstance(value, dict), setting, value, "a section of keys")
        return section_of(hint, setting, value)  # type: ignore[arg-type]
    if get_origin(hint) is list:
        require(isinstance(value, list), setting, value, "a list")
        [kind] = get_args(hint)
        return [_converted(each, kind, setting) for each in value]
    kinds = get_args(hint) or (hint,)
    # not isinstance, for which true is a number
    if type(value) in kinds:
        return value
    if float in kinds and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            # YAML reads 1e9 as a string
            return float(value)
        except ValueError:
            pass
    wanted = " or ".join(
        "null" if kind is NoneType else kind.__name__ for kind in kinds
    )
    raise ConfigError(f"{setting}: got {value!r}, wanted {wanted}")
