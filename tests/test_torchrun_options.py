"""Options of torchrun in moe-ckpt's own commands: all options, in all spellings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from launcher.start_train import train_command
from moe_ckpt.errors import ConfigError
from moe_ckpt.start_run import run_command
from moe_ckpt.torchrun_options import FLAGS, OF_PROGRAMS, OF_SHELLS, WITH_VALUE
from scripts.write_configuration import ROOT

TRAIN = str(ROOT / "launcher" / "train.py")
RUN = ("-m", "moe_ckpt.run")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "pretrain.py"
    path.write_text('if __name__ == "__main__":\n    pass\n')
    return str(path)


def test_the_table_has_all_options_of_torchrun() -> None:
    """Compares with torchrun's own usage.

    Fails when a release of torch adds an option, or adds a value to an option.
    """
    usage = get_args_parser().format_usage().replace("\n", " ")
    # the usage shows these two as -r and -t
    with_value = set(re.findall(r"\[--([\w-]+) [A-Z{]", usage)) | {"redirects", "tee"}
    flags = set(re.findall(r"\[--([\w-]+)\]", usage))
    assert with_value <= {*WITH_VALUE, *OF_SHELLS}
    assert flags <= {*FLAGS, *OF_PROGRAMS}
    assert not set(WITH_VALUE) & {*FLAGS, *OF_PROGRAMS}


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc-per-node=2", "--max-restarts=1", "+ckpt=gemini", "model=small"),
        ("--nproc-per-node", "2", "--max-restarts", "1", "+ckpt=gemini", "model=small"),
        ("--nproc_per_node", "2", "+ckpt=gemini", "--max-restarts=1", "model=small"),
        ("+ckpt=gemini", "model=small", "--nproc-per-node", "2", "--max-restarts", "1"),
    ],
)
def test_options_of_a_training_are_those_of_torchrun(words: tuple[str, ...]) -> None:
    assert train_command(words)[1:] == [
        *("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"),
        *(TRAIN, "+ckpt=gemini", "model=small"),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc-per-node=2", "-r", "3", "--ckpt=gemini", "--set", "every_iters=5"),
        (
            "--nproc-per-node",
            "2",
            "--redirects=3",
            "--ckpt",
            "gemini",
            "--set=every_iters=5",
        ),
        ("--ckpt", "gemini", "--set", "every_iters=5", "--nproc_per_node", "2", "-r3"),
    ],
)
@pytest.mark.parametrize("separator", [(), ("--",)])
def test_options_of_an_attached_run_may_come_in_any_order(
    words: tuple[str, ...], separator: tuple[str, ...], script: str
) -> None:
    assert run_command([*words, *separator, script, "--set", "x", "--", "-r"])[1:] == [
        *("-m", "torch.distributed.run", "--nproc-per-node=2", "--redirects=3"),
        *(
            *RUN,
            "--ckpt=gemini",
            "--set=every_iters=5",
            "--",
            script,
            "--set",
            "x",
            "--",
            "-r",
        ),
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--nproc-per-node=2", "train.itertions=5"],
            "train.itertions: no such setting, wanted one of",
        ),
        (
            ["--nproc-per-node=2", "--multirun", "ckpt=moc,gemini"],
            "--multirun: got 'an option of Hydra', wanted one",
        ),
        (["--nproc-per-nodes=2"], "unrecognized arguments: --nproc-per-nodes=2; "),
        (
            ["--nproc-per-node"],
            "argument --nproc-per-node/--nproc_per_node: expected one argument",
        ),
        (["--module"], "unrecognized arguments: --module; "),
        (
            ["--nproc-per-node=3", "parallel.pp=2"],
            "parallel.pp * parallel.tp: got 2, wanted a divisor of 3 processes",
        ),
        (
            ["--nnodes", "3", "parallel.pp=2"],
            "parallel.pp * parallel.tp: got 2, wanted a divisor of 3 processes",
        ),
    ],
)
def test_a_mistake_is_found_before_torchrun_starts(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_command(words)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("words", [["--nproc-per-node=gpu"], ["--nnodes=1:3"]])
def test_a_layout_is_left_to_the_ranks_where_their_number_is_not_known(
    words: list[str],
) -> None:
    assert train_command([*words, "parallel.pp=2"])[-1] == "parallel.pp=2"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--nproc-per-node=2", "--set", "windw=4", "--"],
            "ckpt.windw: no such setting, wanted window",
        ),
        (
            ["--nproc-per-nodes=2", "--"],
            "unrecognized arguments: --nproc-per-nodes=2; ",
        ),
    ],
)
def test_a_mistake_in_an_attached_run_is_found_before_torchrun_starts(
    words: list[str], says: str, script: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_command([*words, script])
    assert str(caught.value).startswith(says)


def test_a_program_that_is_not_there_is_found_before_torchrun_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"^SCRIPT: got '/nowhere\.py', wanted a Python script"
    ):
        run_command(["--nproc-per-node=2", "--", "/nowhere.py"])
