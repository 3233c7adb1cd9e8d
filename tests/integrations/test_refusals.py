"""Refusals of the attachment to Megatron-LM before a model is built.

The attachment refuses options, versions, loops and programs.
"""

from __future__ import annotations

import importlib
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from benchmarks.recipes import EXACT_SINCE, SPEED, read_recipes, refused_now
from moe_ckpt import run
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations import loops
from moe_ckpt.integrations import megatron_lm_seams as seams
from moe_ckpt.integrations.loop_seams import mark_attached, what_to_install
from moe_ckpt.integrations.megatron_lm_options import (
    EXACT,
    REFUSALS,
    Refusal,
    option_table,
    require_supported,
)
from moe_ckpt.integrations.other_loops import BRIDGE, OTHER_LOOPS, refuse_other_loops
from moe_ckpt.loop_names import LOOP_MODULES
from moe_ckpt.run_elastic import require_forkable, run_elastic
from moe_ckpt.run_settings import parse_run
from scripts.fetch_megatron_lm import FOLDER
from tests.scenarios import ROOT

FINE = {
    "num_experts": 4,
    "num_layers": 2,
    "use_distributed_optimizer": True,
    "pipeline_model_parallel_size": 2,
    **{refusal.option: refusal.allowed[0] for refusal in REFUSALS},
}
GUARDED = 'if __name__ == "__main__":\n    print("trained")\n'


def test_the_options_of_the_example_are_fine() -> None:
    require_supported(Namespace(**FINE))
    dense = Namespace(
        num_experts=None,
        use_distributed_optimizer=False,
        pipeline_model_parallel_size=1,
    )
    require_supported(dense)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.option)
def test_each_refused_option_is_named_with_its_reason(refusal: Refusal) -> None:
    got = True if False in refusal.allowed else "another"
    with pytest.raises(ConfigError) as error:
        require_supported(Namespace(**FINE | {refusal.option: got}))
    assert str(error.value).startswith(f"{refusal.flag}: got {got!r}, wanted ")
    assert str(error.value).endswith(refusal.reason)


def test_the_documentation_has_every_option() -> None:
    text = (ROOT / "docs" / "attach.md").read_text()
    assert "\n".join(option_table()) in text, (
        "python -m moe_ckpt.integrations.megatron_lm_options prints the table"
    )


def test_every_exact_option_names_tests_that_exist() -> None:
    for path, _, row in (test.partition(": ") for each in EXACT for test in each.tests):
        assert f'"{row}"' in (ROOT / path).read_text() or not row, (path, row)


def test_recipes_of_megatron_bridge_meet_the_table_of_refusals() -> None:
    recipes = read_recipes()
    assert len(recipes) == 54
    assert set(recipes[0]) >= {*EXACT_SINCE, *SPEED}
    left = {
        recipe["recipe"]
        for recipe in recipes
        if {each.option for each in refused_now(recipe)} - {*SPEED}
    }
    assert left == {
        "deepseek_v4_flash_pretrain_32gpu_h100_bf16_muon",
        "deepseek_v4_flash_pretrain_64gpu_gb200_bf16_muon",
        "kimi_k2_pretrain_512gpu_h100_bf16",
    }, "Muon's state is not in snapshots"


@pytest.mark.skipif(
    not FOLDER.exists(),
    reason="get it by: .venv/bin/python scripts/fetch_megatron_lm.py",
)
def test_every_refused_option_is_one_that_megatron_lm_has() -> None:
    """A misspelled name would refuse no option."""
    sources = [
        *FOLDER.glob("megatron/training/**/*.py"),
        *FOLDER.glob("megatron/core/**/*config*.py"),
    ]
    words = set(
        re.findall(
            r"\w+", "\n".join(path.read_text() for path in sources).replace("-", "_")
        )
    )
    assert [refusal.option for refusal in REFUSALS if refusal.option not in words] == []


@pytest.mark.parametrize("frequency", [2, [0, 1]])
def test_a_stage_without_experts_needs_a_sharded_optimizer(frequency: Any) -> None:
    fine = FINE | {"moe_layer_freq": frequency}
    require_supported(Namespace(**fine))
    with pytest.raises(
        ConfigError, match=r"^--use-distributed-optimizer: got False, wanted True"
    ):
        require_supported(Namespace(**fine | {"use_distributed_optimizer": False}))


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (
            {"pipeline_model_parallel_layout": "Ett|L"},
            "--pipeline-model-parallel-layout: got 'Ett|L'",
        ),
        (
            {"decoder_first_pipeline_num_layers": 2},
            "--decoder-first-pipeline-num-layers: got 2",
        ),
        (
            {"decoder_last_pipeline_num_layers": 2},
            "--decoder-last-pipeline-num-layers: got 2",
        ),
        (
            {"account_for_loss_in_pipeline_split": True, "num_layers": 1},
            "--account-for-loss-in-pipeline-split: got True",
        ),
    ],
    ids=str,
)
def test_a_stage_without_layers_is_refused(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{re.escape(flag)}, wanted a layer in each stage"
    ):
        require_supported(Namespace(**FINE | options))


def test_a_version_that_was_not_tried_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron.core.__version__", "0.21.0")
    name = "megatron.training.training"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(
        ConfigError,
        match=r"^megatron-core: got 0\.21\.0, wanted 0\.18\.\* or 0\.19\.\*",
    ):
        seams.import_training()


WHAT_TO_INSTALL = {
    "too old": (
        (3, 11),
        True,
        "Python 3.12 or newer (this is 3.11), and pip install 'loop>=1'",
    ),
    "the same": ((3, 12), False, "pip install 'loop>=1'"),
    "newer": ((3, 13), True, "pip install 'loop>=1'"),
    "too new": (
        (3, 13),
        False,
        "Python 3.12 (this is 3.13), and pip install 'loop>=1'",
    ),
}


@pytest.mark.parametrize(
    ("this", "or_newer", "wanted"), WHAT_TO_INSTALL.values(), ids=WHAT_TO_INSTALL
)
def test_what_to_install_names_python_where_this_one_has_no_such_release(
    this: tuple[int, int], or_newer: bool, wanted: str
) -> None:
    assert what_to_install("loop>=1", (3, 12), or_newer=or_newer, this=this) == wanted


def loop_module(tried: str = "0.19") -> ModuleType:
    """Return a fake loop with all functions, parameters and calls of the seams.

    Args:
        tried: Version of Megatron-Core whose seams the loop has.
    """
    module, parameters = (
        ModuleType("megatron.training.training"),
        seams.parameters_of(tried),
    )
    for name in (*parameters, *seams.CALLS):
        calls = " + ".join(f"{each}()" for each in seams.CALLS.get(name, ())) or "0"
        exec(
            f"def {name}({', '.join(parameters.get(name, ()))}): return {calls}",
            vars(module),
        )
    return module


def test_a_seam_without_its_calls_is_named() -> None:
    """Other tests cover missing names.

    test_bridge_refusals.py covers missing functions, the next test missing parameters.
    """
    module: Any = loop_module()
    seams.require_training(module, "0.19")
    module.pretrain = lambda: module.train()
    wanted = (
        r"^megatron\.training\.training\.pretrain: got another .* wanted one with calls"
        r" of initialize_megatron"
    )
    with pytest.raises(ConfigError, match=wanted):
        seams.require_training(module, "0.19")


def test_the_parameters_of_another_version_are_not_enough() -> None:
    module = loop_module("0.18")
    seams.require_training(module, "0.18")
    wanted = (
        r"train: got another .* wanted one with the parameters .*p2p_communicator,"
        r" pg_collection, as in .* 0\.19"
    )
    with pytest.raises(ConfigError, match=wanted):
        seams.require_training(module, "0.19")


def test_a_second_attachment_is_refused() -> None:
    module = loop_module()
    mark_attached(module)
    with pytest.raises(
        ConfigError,
        match=r"^moe_ckpt\.run: got a second attachment to megatron\.training, ",
    ):
        mark_attached(module)


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run moe_ckpt.run in this process, which torchrun has not started.

    Returns:
        The exit status, and the text on standard error.
    """
    status = run.main(arguments)
    return status, capsys.readouterr().err


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove torchrun's variables from the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GUARDED, "error: this process was not started by torchrun"),
        (
            "print('trained')\n",
            'wanted one that trains under `if __name__ == "__main__":` only',
        ),
        ("if True print\n", "wanted a Python script (invalid syntax"),
        (None, "wanted a Python script ([Errno 2] No such file"),
    ],
)
def test_a_script_that_cannot_be_run_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    status, error = outcome(capsys, "--", str(script))
    assert status == 1
    assert message in error
    assert "Traceback" not in error


def test_a_runner_inside_a_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = loop_module()
    mark_attached(module)
    monkeypatch.setitem(sys.modules, "megatron.training.training", module)
    status, error = outcome(capsys, "--", "train.py")
    assert status == 1
    assert error.startswith(
        "error: moe_ckpt.run: got 'a second one', wanted one attachment a process"
    )


@pytest.mark.parametrize("loop", LOOP_MODULES)
def test_whole_checkpoints_are_left_to_the_loop(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loops.LOOP_IMPORTS, loop, lambda: None)
    settings = parse_run(["--loop", loop, "--ckpt", "dense", "--", "train.py"])
    wanted = f"another policy: {loop} saves and loads whole states by itself"
    with pytest.raises(ConfigError) as error:
        run.start(settings, cast("Any", None), [])
    assert str(error.value) == f"--ckpt: got 'dense', wanted {wanted}"


@pytest.mark.parametrize("name", OTHER_LOOPS)
def test_a_loop_without_an_attachment_is_refused_at_its_import(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's package can still be imported, for conversions for example.

    The check also finds a loop that was imported before.
    """
    root, *parts = name.split(".")
    file = tmp_path.joinpath(*parts).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text("")
    package = ModuleType(root)
    package.__path__ = [str(tmp_path)]
    before = {
        each: module
        for each, module in sys.modules.items()
        if each.partition(".")[0] != root
    }
    monkeypatch.setattr(sys, "modules", {**before, root: package})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    refuse_other_loops("megatron-lm")
    importlib.import_module(name.rpartition(".")[0])
    with pytest.raises(
        ConfigError,
        match=r"^moe_ckpt\.run: got (Megatron-Bridge|ms-swift)'s (training )?loop",
    ):
        importlib.import_module(name)
    sys.meta_path.pop(0)
    importlib.import_module(name)
    with pytest.raises(ConfigError, match=r"wanted .*: nothing would be protected"):
        refuse_other_loops("megatron-lm")


def test_the_attached_loop_alone_can_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    refuse_other_loops("megatron-bridge")
    finder: Any = sys.meta_path[0]
    assert finder.find_spec(BRIDGE, None) is None
    for name in set(OTHER_LOOPS) - {BRIDGE}:
        with pytest.raises(ConfigError, match="nothing would be protected"):
            finder.find_spec(name, None)


@pytest.mark.parametrize("options", [[], ["--plain"]], ids=" ".join)
def test_without_megatron_the_error_names_it(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("megatron.training.training", "moe_ckpt.megatron.determinism"):
        # makes an import of the module fail, as without Megatron
        monkeypatch.setitem(sys.modules, name, None)
    # pip has the loop only for Python 3.12 and newer: on an older Python the error also
    # names the wanted version
    python = (
        r"Python 3\.12 or newer \(this is 3\.11\), and "
        if sys.version_info < (3, 12)
        else ""
    )
    wanted = (
        rf"^megatron\.training: got no such package .*, wanted {python}pip install"
        r" 'megatron-core>=0\.18,<0\.20'"
    )
    with pytest.raises(ConfigError, match=wanted):
        run.start(run.parse_run([*options, "train.py"]), cast("Any", None), [])


def test_an_import_that_has_started_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as in a forked process after a start of CUDA
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError,
        match=r"runtime\.guard: got True, wanted false: an import has started CUDA",
    ):
        run_elastic(cast("Any", None), cast("Any", None), lambda worker: 0)


def test_without_a_gpu_a_look_for_one_is_no_started_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as in a fork of a CUDA build of torch that has found no device
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_forkable()


def test_the_question_for_a_gpu_does_not_start_cuda_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(
        torch.cuda,
        "is_available",
        lambda: pytest.fail("asked, which may start CUDA before a fork"),
    )
    require_forkable()
