"""Attachment by environment variable alone: attached processes, others, and errors."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from launcher.prove.__main__ import main as prove
from launcher.prove.runs import EXACT
from moe_ckpt.door import attached_command, split_command, unprotected_loops
from moe_ckpt.door_file import NAME, change_file, main
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.megatron_lm_options import require_alone
from moe_ckpt.loop_names import LOOP_MODULES
from scripts.fetch_megatron_lm import FOLDER
from tests.harness.jobs.attached_jobs import ARGUMENTS, EXAMPLE
from tests.waits import START_S

ROOT = Path(__file__).parents[1]
LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize(
    ("words", "own", "program"),
    [
        (["train.py", "--m", "-c"], [], ["train.py", "--m", "-c"]),
        (["-u", "-W", "ignore", "train.py"], ["-u", "-W", "ignore"], ["train.py"]),
        (
            ["-Wignore", "-X", "dev", "-m", "pre.train", "-m"],
            ["-Wignore", "-X", "dev"],
            ["-m", "pre.train", "-m"],
        ),
        (["-um", "pre.train", "x"], ["-u"], ["-m", "pre.train", "x"]),
        (["-mpre.train", "x"], [], ["-m", "pre.train", "x"]),
        (
            ["--check-hash-based-pycs", "never", "a/b"],
            ["--check-hash-based-pycs", "never"],
            ["a/b"],
        ),
    ],
)
def test_a_program_is_told_from_pythons_own_options(
    words: list[str], own: list[str], program: list[str]
) -> None:
    assert split_command(words) == (own, program)


@pytest.mark.parametrize(
    "words", [[], ["-c", "train()"], ["-uc", "train()"], ["-"], ["-W", "ignore"]]
)
def test_a_process_without_a_script_cannot_be_attached_to(words: list[str]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^MOE_CKPT: got a process without a script, wanted `python SCRIPT`",
    ):
        attached_command("moevement", ["python", *words])


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("gemini", ["--ckpt", "gemini"]),
        ("gemini --set every_iters=2", ["--ckpt", "gemini", "--set", "every_iters=2"]),
        ("--config 'my ft.yaml'", ["--config", "my ft.yaml"]),
    ],
)
def test_the_variable_is_a_policy_or_a_command_line(
    value: str, options: list[str]
) -> None:
    command = attached_command(value, ["python", "-u", "train.py", "--x"])
    assert command == ["-u", "-m", "moe_ckpt.run", *options, "--", "train.py", "--x"]


def test_a_value_that_is_no_command_line_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"^MOE_CKPT: got \"--set 'x\", wanted a policy or options of moe_ckpt\.run"
        ),
    ):
        attached_command("--set 'x", ["python", "train.py"])


@pytest.mark.parametrize("loop", LOOP_MODULES)
def test_a_loop_is_not_imported_without_protection(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [unprotected_loops(), *sys.meta_path])
    assert importlib.import_module("json")
    with pytest.raises(
        ConfigError,
        match=(
            r"^MOE_CKPT: got a process that torchrun has not started, wanted one with R"
        ),
    ):
        sys.meta_path[0].find_spec(LOOP_MODULES[loop].training, None)


@pytest.mark.parametrize(
    ("environment", "modules", "library"),
    [
        (
            ["LM_RESILIENCY_TORCHRUN_BOOTSTRAP"],
            [],
            "lm-resiliency (the variable LM_RESILIENCY_TORCHRUN_BOOTSTRAP)",
        ),
        (
            ["FT_RANK_MONITOR_IPC_SOCKET"],
            [],
            "nvidia-resiliency-ext's ft_launcher (the variable FT_RANK_MONITOR_IPC",
        ),
        (
            [],
            ["torchft"],
            (
                "torchft (its import torchft), wanted one of the two: another library"
                " would replace"
            ),
        ),
    ],
)
def test_another_library_that_is_active_is_named(
    environment: list[str], modules: list[str], library: str
) -> None:
    require_alone(["RANK"], ["nvidia_resiliency_ext"])
    with pytest.raises(ConfigError) as error:
        require_alone(environment, modules)
    assert str(error.value).startswith(f"moe_ckpt.run: got {library}")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of a new environment with the door.

    The environment has this checkout and the packages of this environment.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "a_paths.pth").write_text(f"{ROOT}\n{Path(pytest.__file__).parents[1]}\n")
    python = str(folder / "bin" / "python")
    for action, is_there in (
        ("install", True),
        ("remove", False),
        ("remove", False),
        ("install", True),
    ):
        subprocess.run([python, "-m", "moe_ckpt.cli", "door", action], check=True)
        assert (site / NAME).exists() is is_there
    return python


def outcome(python: str, *words: str, **variables: str) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of a Python process."""
    hidden = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MOE_CKPT",
        "PYTHONPATH",
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in hidden
    }
    ended = subprocess.run(
        [python, *words],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_without_the_variable_nothing_is_imported(python: str) -> None:
    command = (
        "-c",
        "import sys; print([name for name in sys.modules if 'moe_ckpt' in name])",
    )
    assert outcome(python, *command, **LAUNCHED) == (0, "[]\n", "")
    assert outcome(python, *command, **LAUNCHED, MOE_CKPT="") == (0, "[]\n", "")


def test_a_process_that_does_not_train_stays_as_it_is_but_for_the_loop(
    python: str, tmp_path: Path
) -> None:
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "training.py").write_text("print('the loop')\n")
    assert outcome(python, "-c", "print(1)", MOE_CKPT="gemini") == (0, "1\n", "")
    importing = ("-c", "import megatron.training.training")
    assert outcome(python, *importing, PYTHONPATH=str(tmp_path)) == (
        0,
        "the loop\n",
        "",
    )
    status, out, error = outcome(
        python, *importing, PYTHONPATH=str(tmp_path), MOE_CKPT="gemini"
    )
    assert (status, out) == (1, "")
    assert "ConfigError: MOE_CKPT: got a process that torchrun has not started" in error


def test_a_second_attachment_is_one_error(python: str) -> None:
    words = ("-m", "moe_ckpt.run", "--", "train.py")
    wanted = (
        "error: MOE_CKPT: got 'gemini' beside `-m moe_ckpt.run`, wanted one of the"
        " two\n"
    )
    assert outcome(python, *words, **LAUNCHED, MOE_CKPT="gemini") == (1, "", wanted)


def test_a_launched_process_becomes_the_runner(python: str, tmp_path: Path) -> None:
    """The first error is the runner's, about an unknown policy: no script has begun."""
    script = tmp_path / "train.py"
    script.write_text("print('begun')\n")
    status, out, error = outcome(python, str(script), **LAUNCHED, MOE_CKPT="gemni")
    assert (status, out) == (1, f"moe_ckpt: MOE_CKPT attaches to {script}\n")
    assert "--ckpt: got 'gemni', wanted one of none, dense, moevement" in error


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^site-packages: got '.*nowhere', wanted a folder that can be written",
    ):
        change_file(tmp_path / "nowhere", is_wanted=True)


def test_an_unknown_action_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["open"]) == 1
    assert (
        capsys.readouterr().err
        == "error: ACTION: got 'open', wanted one of install, remove\n"
    )


@pytest.mark.full
@pytest.mark.skipif(
    not FOLDER.exists(),
    reason="get it by: .venv/bin/python scripts/fetch_megatron_lm.py",
)
def test_a_job_with_the_variable_alone_is_exact_under_kills(
    python: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv(
        "MOE_CKPT", "moevement --set window=2 --set runtime.heartbeat_s=30"
    )
    torchrun = (
        python,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
    )
    status = prove(
        [
            "-o",
            str(tmp_path / "out"),
            "--",
            *torchrun,
            str(EXAMPLE),
            *ARGUMENTS,
            "--train-iters",
            "12",
        ]
    )
    assert (status, capsys.readouterr().err) == (EXACT, "")
