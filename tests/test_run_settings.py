"""The command line of moe_ckpt.run: settings, and one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.config import CKPT_CONFIGS, GeminiConfig, MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations.loops import LOOP_IMPORTS
from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.run_settings import Command, parse_run

SCRIPT = ("--", "pretrain_gpt.py", "--num-layers", "2")
HINT = "; `python -m moe_ckpt.run --help` lists all options"


def test_options_come_before_the_script_and_its_arguments_after() -> None:
    settings = parse_run(
        [
            "--ckpt",
            "moevement",
            "--set",
            "window=4",
            "--set",
            "runtime.join_s=900",
            *SCRIPT,
        ]
    )
    assert settings.command == Command(
        name="pretrain_gpt.py", is_module=False, arguments=("--num-layers", "2")
    )
    assert isinstance(settings.job.ckpt, MoevementConfig)
    assert (settings.job.ckpt.window, settings.job.runtime.join_s) == (4, 900.0)
    assert (settings.job.ckpt.keep_windows, settings.job.runtime.shared_memory) == (
        1,
        "/dev/shm",
    ), "as conf/ has them"


@pytest.mark.parametrize(
    "words",
    [("--ckpt=none", "train.py", "--set", "y"), ("--", "train.py", "--set", "y")],
)
def test_the_script_begins_where_the_options_end(words: tuple[str, ...]) -> None:
    assert parse_run(words).command == Command(
        name="train.py", is_module=False, arguments=("--set", "y")
    )


def test_a_module_is_run_by_its_name() -> None:
    command = parse_run(["--", "-m", "pretrain.gpt", "-m", "x"]).command
    assert command == Command(
        name="pretrain.gpt", is_module=True, arguments=("-m", "x")
    )


@pytest.mark.parametrize("policy", CKPT_CONFIGS)
def test_each_policy_has_the_defaults_of_its_file(policy: str) -> None:
    assert parse_run(["--ckpt", policy, *SCRIPT]).job.ckpt.policy == policy


def test_the_loop_is_megatron_lms_unless_it_is_named() -> None:
    assert set(LOOP_MODULES) == set(LOOP_IMPORTS), "each loop has its class"
    assert parse_run(SCRIPT).loop == "megatron-lm"
    assert parse_run(["--loop", "megatron-bridge", *SCRIPT]).loop == "megatron-bridge"


def test_a_file_is_read_first_and_assignments_replace_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "ft.yaml"
    path.write_text(
        "ckpt: {policy: gemini, every_iters: 5, max_bytes_per_s: {host: 1e9}}\nrun:"
        " {dir: there}\n"
    )
    settings = parse_run(
        [
            "--config",
            str(path),
            "--set",
            "every_iters=3",
            "--set",
            "max_bytes_per_s.disk=2e6",
            *SCRIPT,
        ]
    )
    assert isinstance(settings.job.ckpt, GeminiConfig)
    caps = settings.job.ckpt.max_bytes_per_s
    assert (settings.job.ckpt.every_iters, caps.host, caps.peers, caps.disk) == (
        3,
        1e9,
        None,
        2e6,
    )
    assert settings.job.folder.dir == "there"
    assert "every_iters: 3" in settings.job.folder.configuration


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--ckpt", "gemni", *SCRIPT],
            "--ckpt: got 'gemni', wanted one of none, dense, moevement, gemini",
        ),
        (
            ["--loop", "swift", *SCRIPT],
            "--loop: got 'swift', wanted one of megatron-lm, megatron-bridge, ms-swift",
        ),
        (["--windw", "4", *SCRIPT], f"unrecognized arguments: --windw{HINT}"),
        (["--ckpt"], f"argument --ckpt: expected one argument{HINT}"),
        ([], "SCRIPT: got 'nothing', wanted the program that trains"),
        (
            ["--set", "run.keep_batches_bytes=0", *SCRIPT],
            "run.keep_batches_bytes: got 0, wanted a number of bytes",
        ),
        (["--", "-m"], "-m: got 'nothing', wanted the name of a module"),
        (["--set", "windw=4", *SCRIPT], "ckpt.windw: no such setting, wanted window"),
        (["--set", "window", *SCRIPT], "--set: got 'window', wanted KEY=VALUE"),
        (
            ["--set", "runtime=4", *SCRIPT],
            "--set: got 'runtime=4', wanted a key in the section",
        ),
        (["--set", "window=4.5", *SCRIPT], "ckpt.window: got 4.5, wanted int or str"),
        (["--set", "strict=3", *SCRIPT], "ckpt.strict: got 3, wanted bool"),
        (
            ["--set", "max_bytes_per_s=3", *SCRIPT],
            "ckpt.max_bytes_per_s: got 3, wanted a section of keys",
        ),
        (["--set", "run.dr=x", *SCRIPT], "run.dr: no such setting, wanted dir"),
        (
            ["--set", "runtime.join_s=1", *SCRIPT],
            "runtime.join_s: got 1.0, wanted more than",
        ),
        (
            [
                *("--set", "runtime.spare_nodes=1", "--set", "runtime.join_s=300"),
                *("--set", "runtime.node_s=150", *SCRIPT),
            ],
            "runtime.node_s: got 150.0, wanted less than half of runtime.join_s=300: s",
        ),
        (
            ["--set", "parallel.ranks_per_node=0", *SCRIPT],
            "parallel.ranks_per_node: got 0, wanted auto or a number",
        ),
        (
            ["--set", "run.dir=a\udcff", *SCRIPT],
            "--set: got 'run.dir=a\\udcff', wanted a text in UTF-8",
        ),
        (["--set", "run.dir=5", *SCRIPT], "run.dir: got 5, wanted str or null"),
        (
            ["--config", "/nowhere.yaml", *SCRIPT],
            "--config: got '/nowhere.yaml', wanted a YAML file",
        ),
    ],
)
def test_a_mistake_is_one_error_that_names_it(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_run(words)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, r"^--config: ") for text in ("- 1", "ckpt: 3", "ckpt: {")),
        ("ckp: {window: 3}", r"^ckp: no such setting, wanted ckpt$"),
    ],
)
def test_a_file_without_the_known_sections_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "ft.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_run(["--config", str(tmp_path / "ft.yaml"), *SCRIPT])
