"""Every setting reaches the job, in the launcher, an own loop and an attached loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from launcher.config import compose_settings
from moe_ckpt.config import CheckConfig, RunFolderConfig, RuntimeConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.job_config import JobConfig
from moe_ckpt.run_settings import ckpt_config, parse_run, runtime_config
from tests.loop_configs import loop_config

RUNTIME: dict[str, Any] = {
    "guard": True,
    "standby": True,
    "backend": "staged",
    "share_gpus": True,
    "heartbeat_s": 6.0,
    "progress_s": 121.0,
    "form_s": 31.0,
    "operation_s": 301.0,
    "abort_s": 21.0,
    "join_s": 601.0,
    "grace_s": 0.06,
    "copy_s": 61.0,
    "max_deaths": 21,
    "sick_deaths": 22,
    "sick_within_s": 3601.0,
    "health": "true",
    "health_s": 33.0,
    "sick_place": "leave",
    "spare_nodes": 1,
    "node_s": 11.0,
    "etcd": "host:2379",
    "stop_save_s": 23.0,
    "notice_file": "notice",
    "suspect_iters": 3,
    "on_divergence": "end",
    "replace_on": ["flaky"],
    "end_on": ["fatal"],
    "shared_memory": "memory",
}
"""A value for each key of conf/runtime, none of them the default."""

CHECKS = {"digest_every_iters": 5, "digest_tensors": True, "leave_out": "moments"}
"""A value for each key of `run` about comparisons, none of them the default."""

LOST = {"iteration": 4, "stage": 0, "phase": "step", "dp_rank": None}


def launched(folder: str) -> JobConfig:
    values = {f"runtime.{key}": value for key, value in RUNTIME.items()}
    values |= {f"run.{key}": value for key, value in CHECKS.items()}
    values |= {
        "run.dir": folder,
        "parallel.ranks_per_node": 2,
        "train.check_determinism": True,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    lost = ",".join(
        f"{key}:{'null' if value is None else value}" for key, value in LOST.items()
    )
    return compose_settings(
        ["ckpt=moevement", "fault=state_loss", f"fault.at=[{{{lost}}}]", *words]
    ).job


def attached(folder: str) -> JobConfig:
    values = {f"runtime.{key}": value for key, value in RUNTIME.items()}
    values |= {f"run.{key}": value for key, value in CHECKS.items()}
    values |= {
        "run.dir": folder,
        "run.lose": [LOST],
        "run.check_determinism": True,
        "parallel.ranks_per_node": 2,
    }
    words = [f"--set={key}={json.dumps(value)}" for key, value in values.items()]
    return parse_run(["--ckpt", "moevement", *words, "--", "train.py"]).job


def own(folder: str) -> JobConfig:
    return loop_config(
        "moevement",
        runtime=runtime_config(**RUNTIME),
        run_dir=folder,
        ranks_per_node=2,
        checks=CheckConfig(**CHECKS),  # type: ignore[arg-type]
        losses=[StateLoss(**LOST)],  # type: ignore[arg-type]
        check_determinism=True,
    ).job


def test_the_values_differ_from_all_defaults() -> None:
    default = asdict(runtime_config())
    assert (
        RUNTIME.keys()
        == default.keys()
        == {field.name for field in fields(RuntimeConfig)}
    )
    assert [key for key, value in RUNTIME.items() if value == default[key]] == []
    assert CHECKS.keys() == {field.name for field in fields(CheckConfig)}


@pytest.mark.parametrize("way", [launched, attached, own])
def test_each_setting_reaches_the_job(way: Callable[[str], JobConfig]) -> None:
    """`moe_ckpt.loop` and `run_elastic` use only `JobConfig`, whichever loop trains."""
    job = way("/run")
    assert asdict(job.runtime) == RUNTIME
    assert {key: getattr(job.checks, key) for key in CHECKS} == CHECKS
    assert list(job.losses) == [StateLoss(**LOST)]  # type: ignore[arg-type]
    assert (job.folder.dir, job.ranks_per_node, job.check_determinism) == (
        "/run",
        2,
        True,
    )
    assert job.is_supervised


@pytest.mark.parametrize("way", [launched, attached, own])
def test_a_report_finds_the_policy(
    way: Callable[[str], JobConfig], tmp_path: Path
) -> None:
    # imported here, because the module imports the libraries of the report
    from launcher.report.read import read_runs  # noqa: PLC0415

    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(way("/run").folder.configuration)
    (run,) = read_runs([tmp_path])
    assert run.policy == "moevement"


def job_of(policy: str, guard: bool | str, **runtime: Any) -> JobConfig:
    folder = RunFolderConfig(dir=None, name="run", configuration="")
    return JobConfig(
        ckpt=ckpt_config(policy),
        runtime=runtime_config(guard=guard, **runtime),
        folder=folder,
    )


@pytest.mark.parametrize(
    ("policy", "guard", "supervised"),
    [
        ("moevement", "auto", True),
        ("moevement", False, False),
        ("gemini", "auto", True),
        ("dense", "auto", False),
        ("none", False, False),
    ],
)
def test_the_policy_chooses_whether_there_are_supervisors(
    policy: str, guard: bool | str, supervised: bool
) -> None:
    assert job_of(policy, guard).is_supervised is supervised


@pytest.mark.parametrize(
    ("policy", "guard", "wanted"),
    [
        ("dense", True, "wanted false, or a ckpt other than dense and none"),
        ("gemini", False, "wanted auto or true with ckpt=gemini"),
    ],
)
def test_supervisors_that_do_not_fit_the_policy_are_refused(
    policy: str, guard: bool, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=f"runtime.guard: got {guard}, {wanted}"):
        _ = job_of(policy, guard).is_supervised


def test_spare_nodes_without_supervisors_are_refused() -> None:
    wanted = r"^runtime\.spare_nodes: got 1, wanted 0 without supervisors: a spare"
    with pytest.raises(ConfigError, match=wanted):
        _ = job_of("dense", "auto", spare_nodes=1).is_supervised
    with pytest.raises(ConfigError, match=wanted):
        parse_run(["--plain", "--set", "runtime.spare_nodes=1", "--", "train.py"])
    assert job_of("moevement", "auto", spare_nodes=1).is_supervised


def test_waiting_processes_without_supervisors_are_refused() -> None:
    wanted = r"^runtime\.standby: got True, wanted auto or false"
    with pytest.raises(ConfigError, match=f"{wanted} without supervisors"):
        _ = job_of("dense", "auto", standby=True).is_supervised
    with pytest.raises(ConfigError, match=f"{wanted} with --plain"):
        parse_run(["--plain", "--set", "runtime.standby=true", "--", "train.py"])
    assert job_of("moevement", "auto", standby=True).is_supervised
    assert not job_of("dense", "auto", standby="auto").is_supervised


def test_an_attached_loop_has_supervisors_unless_it_is_plain() -> None:
    with pytest.raises(
        ConfigError,
        match=r"runtime\.guard: got False, wanted auto or true: --plain is without",
    ):
        parse_run(["--set", "runtime.guard=false", "--", "train.py"])
    with pytest.raises(
        ConfigError,
        match=r"runtime\.guard: got True, wanted auto or false with --plain",
    ):
        parse_run(["--plain", "--set", "runtime.guard=true", "--", "train.py"])
    assert parse_run(
        ["--plain", "--set", "runtime.guard=false", "--", "train.py"]
    ).is_plain


@pytest.mark.parametrize("key", ["progress", "tensorboard", "name"])
def test_settings_of_the_launchers_display_are_refused_elsewhere(key: str) -> None:
    with pytest.raises(ConfigError, match=f"run.{key}: no such setting, wanted "):
        parse_run(["--set", f"run.{key}=1", "--", "train.py"])


def test_a_run_folder_that_is_no_utf8_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is written into JSON and sent to other ranks.

    The check includes the name of the working directory.
    """
    named = r"^run.dir: got '.*run\\udcff.*', wanted a path in UTF-8$"
    with pytest.raises(ConfigError, match=named):
        RunFolderConfig(dir="outputs/run\udcff", name="run", configuration="")
    RunFolderConfig(dir="outputs/r\u00fcn", name="run", configuration="")
    (tmp_path / "run\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "run\udcff")
    for folder in (None, "outputs/run"):
        with pytest.raises(ConfigError, match=named):
            RunFolderConfig(dir=folder, name="run", configuration="")
    RunFolderConfig(dir=str(tmp_path), name="run", configuration="")
