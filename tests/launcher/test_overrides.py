"""Command lines of settings: options of Hydra are refused, and `--help` lists all keys.

Each setting has one value.
"""

from __future__ import annotations

import re
from typing import get_type_hints

import pytest

from launcher import simulate, train
from launcher.config import GROUPS, Settings, compose_settings
from launcher.faults.config import FAULT_CONFIGS
from launcher.overrides import help_text, last_values
from moe_ckpt.config import CKPT_CONFIGS
from moe_ckpt.config_keys import keys_of

MAINS = pytest.mark.parametrize(
    "main", [train.main, simulate.main], ids=["train", "simulate"]
)


@MAINS
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--multirun", "ckpt=moc,gemini"],
            "--multirun: got 'an option of Hydra', wanted one start for each value",
        ),
        (
            ["ckpt=moc", "-m"],
            "-m: got 'an option of Hydra', wanted one start for each value",
        ),
        *(
            (
                [option, "x"],
                (
                    f"{option}: got 'an option of Hydra', wanted overrides of the"
                    " settings that --help lists"
                ),
            )
            for option in (
                "--config-dir",
                "--config-name",
                "--config-path",
                "-cd",
                "-cn",
                "-cp",
            )
        ),
        (
            ["--config-dir=x"],
            "--config-dir: got 'an option of Hydra', wanted overrides",
        ),
        *(
            (
                [option],
                f"{option}: got 'an option of Hydra', wanted --help, or --cfg job",
            )
            for option in ("--info", "--hydra-help", "--package", "--resolve")
        ),
        (["--run"], "--run: got 'an option of Hydra', wanted no option of Hydra"),
        (["--cfg", "hydra"], "argument --cfg: invalid choice: 'hydra'"),
        (["--iterations", "5"], "unrecognized arguments: --iterations; "),
        (
            ["ckpt=moc,gemini"],
            (
                "ckpt: got 'moc,gemini', wanted one value (start once for each), or a"
                " list as [a, b]"
            ),
        ),
        (["ckpt.window=range(1,3)"], "ckpt.window: got 'range(1,3)', wanted one value"),
        (
            ["ckpt=moc", "+ckpt=gemini"],
            "ckpt: got 'moc' and 'gemini', wanted one value",
        ),
        (
            ["ckpt=gemini", "ckpt.every_iters=1", "+ckpt.every_iters=2"],
            "ckpt.every_iters: got '1' and '2', wanted one",
        ),
        (["run.dir=a\udcff"], "run.dir: got 'a\\udcff', wanted a text in UTF-8"),
        (
            ["hydra.run.dir=x"],
            (
                'hydra.run.dir: got "a setting of Hydra\'s own", wanted one of the'
                " settings"
            ),
        ),
        (["hydra/launcher=x"], "hydra/launcher: got"),
    ],
)
def test_words_that_would_train_nothing_are_refused_by_name(
    main: object, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    assert main(words) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {says}"), said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@MAINS
def test_the_composed_settings_are_printed(
    main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    assert main(["ckpt=gemini", "--cfg", "job", "ckpt.every_iters=7"]) == 0
    assert re.search(r"^  every_iters: 7$", capsys.readouterr().out, re.MULTILINE)


def test_one_value_may_be_given_twice() -> None:
    assert train.main(["ckpt=gemini", "+ckpt=gemini", "--cfg", "job"]) == 0


def test_a_list_is_one_value() -> None:
    kills = compose_settings(
        ["fault=at", "fault.at=[{iteration: 3, rank: 1}, {iteration: 4, rank: 0}]"]
    )
    assert len(kills.fault.kills(2)) == 2


@pytest.mark.parametrize("policy", sorted(CKPT_CONFIGS))
def test_help_explains_every_key_of_the_chosen_files(policy: str) -> None:
    shown = help_text("config", [f"+ckpt={policy}", "train.iterations=5"])
    kinds = {
        **get_type_hints(Settings),
        "ckpt": CKPT_CONFIGS[policy],
        "fault": FAULT_CONFIGS["none"],
    }
    for group in (*GROUPS, "run"):
        for key in keys_of(kinds[group]):
            assert re.search(rf"^  {key}: .*# \S", shown, re.MULTILINE), (group, key)


@MAINS
def test_help_names_the_choices_where_there_is_no_such_one(
    main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(main)
    assert main(["--help", "ckpt=moevemnt"]) == 1
    assert (
        "ckpt: got 'moevemnt', wanted one of checkfreq, dense"
        in capsys.readouterr().err
    )


def test_of_several_values_a_script_keeps_the_last() -> None:
    words = ["+ckpt=dense", "train.lr=1", "train.lr=2", "ckpt=gemini", "~run.x"]
    assert last_values(words) == ["ckpt=gemini", "train.lr=2", "~run.x"]
