"""Megatron-LM's unmodified `pretrain` under moe_ckpt.run is exact after all faults.

Every digest equals the digest of a plain run.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ckpt.faults.schedule import Kill
from scripts.fetch_megatron_lm import FOLDER, TAGS, sources_of
from tests.harness.jobs.attached_jobs import EXAMPLE, NUM_ITERS, Job, run_jobs
from tests.harness.jobs.exact_attached_jobs import (
    BY_GRADIENTS,
    CHECKED,
    KILLS,
    OPTIONS,
    PATIENT,
    PLAIN,
    require_equal,
    require_exact_through_checkpoints,
    require_exact_under_all_faults,
)
from tests.harness.jobs.run_files import EVENTS_OF_A_KILLED_RUN, RESULT_KEYS

CLIENT = str(Path(__file__).with_name("recipe_client.py"))

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(),
    reason="get it by: .venv/bin/python scripts/fetch_megatron_lm.py",
)


def require_exact_under_kills(folder: Path, plain: Job) -> None:
    """Require that the plain job, with kills in each phase, has the same states."""
    with_kills = replace(
        plain,
        name="killed",
        options=(*OPTIONS["moevement"], *PATIENT, *CHECKED),
        kills=KILLS,
    )
    by_gradients = replace(
        with_kills, name="by gradients", options=(*BY_GRADIENTS, *PATIENT, *CHECKED)
    )
    ended = run_jobs(folder, plain, with_kills, by_gradients)
    for name in ("killed", "by gradients"):
        require_equal(ended[name], ended["plain"])
        kept = "rank 0 has kept its process"
        assert ended[name].num_processes == [1, 2, 2, 2], kept
    rebuilt = ended["by gradients"]
    assert rebuilt.steps_again.keys() == {1, 2, 3}, "each dead rank, and no other"
    assert rebuilt.audited == {2, 4, 6}
    killed = ended["killed"]
    assert killed.kinds_of_events >= EVENTS_OF_A_KILLED_RUN
    assert json.loads((killed.run / "result.json").read_text()).keys() == RESULT_KEYS


def test_kills_in_each_phase_leave_the_plain_runs_state(tmp_path: Path) -> None:
    require_exact_under_kills(tmp_path, PLAIN)


def test_a_pass_with_a_wrong_result_is_no_step(tmp_path: Path) -> None:
    """Megatron's rerun machine runs the pass of iteration 2 again.

    The rerun machine ends the loop before the optimizer's step.
    """
    injected = ("--rerun-mode", "validate_results", "--error-injection-rate", "1")
    wrong = Job(
        name="wrong",
        options=("--ckpt", "gemini", "--set", "every_iters=1", *PATIENT),
        arguments=(*injected, "--error-injection-type", "persistent_error"),
    )
    ended = run_jobs(tmp_path, wrong)["wrong"]
    assert ended.status != 0
    assert {iteration for _, iteration in ended.digests} == {1}, ended.log


# rank 0 dies once, in the first evaluation
_DYING = """
import os, pathlib, signal
_plain, _died = forward_step, pathlib.Path("DIED")
def forward_step(*arguments):
    if not torch.is_grad_enabled() and os.environ["RANK"] == "0" and not _died.exists():
        _died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _plain(*arguments)
"""
_MAIN = 'if __name__ == "__main__":'


def test_a_death_in_an_evaluation_leaves_the_plain_runs_state(tmp_path: Path) -> None:
    """Other ranks wait in the evaluation, which has disabled Megatron's rerun machine.

    The machine's collectives need all ranks again after the recovery.
    """
    script = tmp_path / "script.py"
    dying = _DYING.replace("DIED", str(tmp_path / "died"))
    script.write_text(EXAMPLE.read_text().replace(_MAIN, f"{dying}\n{_MAIN}"))
    job = Job(
        name="dying",
        options=(
            *OPTIONS["moevement"],
            *PATIENT,
            *CHECKED,
            "--set",
            "runtime.form_s=20",
        ),
        script=str(script),
    )
    ended = run_jobs(tmp_path, PLAIN, job)
    require_equal(ended["dying"], ended["plain"])
    assert ended["dying"].num_processes == [2, 1, 1, 1]


# counts the forward steps of rank 0's process, and changes a file in iteration 3 (each
# iteration has 2 micro-batches)
_CHANGING = """
import os, pathlib
_calls, _plain = [], forward_step
def forward_step(*arguments):
    _calls.append(1)
    if os.environ["RANK"] == "0" and len(_calls) == 5:
        with pathlib.Path("CHANGED").open("a") as file:
            file.write("# one line more")
    return _plain(*arguments)
"""


@pytest.mark.full
@pytest.mark.parametrize("changed", ["the script", "--vocab-file"])
def test_a_job_whose_inputs_change_ends_at_the_next_death(
    tmp_path: Path, changed: str
) -> None:
    """The test needs processes: only a replacement runs the script again."""
    script, vocabulary = tmp_path / "script.py", tmp_path / "vocabulary"
    vocabulary.write_text("words")
    changing = _CHANGING.replace(
        "CHANGED", str(script if changed == "the script" else vocabulary)
    )
    script.write_text(EXAMPLE.read_text().replace(_MAIN, f"{changing}\n{_MAIN}"))
    job = Job(
        name="changed",
        options=(*OPTIONS["moevement"], *PATIENT),
        kills=(Kill(rank=2, iteration=4, phase="forward"),),
        arguments=("--vocab-file", str(vocabulary)),
        script=str(script),
    )
    ended = run_jobs(tmp_path, job)["changed"]
    assert ended.status != 0
    assert ended.log.count(f"error: {changed}: got ") == 1, ended.log
    assert "on ranks 0, 1, 3 and " in ended.log


@pytest.mark.full
@pytest.mark.parametrize("policy", OPTIONS)
def test_each_policy_is_exact_under_all_faults(tmp_path: Path, policy: str) -> None:
    require_exact_under_all_faults(tmp_path, policy)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["moevement", "gemini", "moc"])
@pytest.mark.parametrize("tag", TAGS)
def test_the_script_of_a_tag_is_exact_under_all_faults(
    tmp_path: Path, tag: str, policy: str
) -> None:
    sources = sources_of(tag)
    if not sources.exists():
        pytest.skip(f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {tag}")
    changed = subprocess.run(
        ["git", "-C", sources, "diff", "--quiet", "HEAD"], check=False
    )
    assert changed.returncode == 0, "the sources are the tag's own"
    require_exact_under_all_faults(
        tmp_path, policy, script=sources / "pretrain_gpt.py", sources=sources
    )


OPTIONS_TOGETHER = {
    "bf16, overlapped reduction": (
        "--bf16",
        "--overlap-grad-reduce",
        "--untie-embeddings-and-output-weights",
        "--swiglu",
    ),
    "fp16, balanced by bias and loss": (
        *("--fp16", "--initial-loss-scale", "65536", "--moe-router-enable-expert-bias"),
        *(
            "--moe-router-score-function",
            "sigmoid",
            "--moe-router-load-balancing-type",
            "aux_loss",
        ),
        *("--moe-aux-loss-coeff", "0.01", "--rerun-mode", "validate_results"),
    ),
    "recomputed, loader processes": (
        *(
            "--recompute-granularity",
            "full",
            "--recompute-method",
            "uniform",
            "--recompute-num-layers",
            "1",
        ),
        *("--num-workers", "1"),
    ),
}
"""Arguments beside the example's, by the name of the combination."""


RECIPES = {
    "overlapped, per token": (
        *(
            "--calculate-per-token-loss",
            "--overlap-param-gather",
            "--overlap-grad-reduce",
        ),
        *("--bf16", "--ddp-bucket-size", "4000"),
    ),
    "frozen base, growing batches": (
        *(
            "--train-only",
            "experts|layernorm",
            "--step-batch-size-schedule",
            "0:4 192:8",
        ),
    ),
    "context parallel": ("--context-parallel-size", "2", "--calculate-per-token-loss"),
    "tokens further ahead": (
        *(
            "--mtp-num-layers",
            "1",
            "--position-embedding-type",
            "rope",
            "--no-rope-fusion",
        ),
        "--untie-embeddings-and-output-weights",
    ),
    "virtual stages": (
        *("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "external iterator": ("--dataloader-type", "external"),
    "external iterator with state": ("--dataloader-type", "external", "--stateful"),
    "external iterators of virtual stages": (
        *("--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--dataloader-type", "external", "--stateful"),
    ),
    "precision-aware optimizer": (
        *(
            "--use-precision-aware-optimizer",
            "--bf16",
            "--exp-avg-dtype",
            "bf16",
            "--exp-avg-sq-dtype",
            "bf16",
        ),
    ),
}
"""Arguments beside the example's for the script `CLIENT`, by the name of the recipe."""


@pytest.mark.full
@pytest.mark.parametrize("name", {**RECIPES, **OPTIONS_TOGETHER})
def test_recipes_are_exact_under_kills(tmp_path: Path, name: str) -> None:
    plain = replace(PLAIN, arguments=OPTIONS_TOGETHER.get(name, ()))
    if name in RECIPES:
        plain = replace(PLAIN, arguments=RECIPES[name], script=CLIENT)
    require_exact_under_kills(tmp_path, plain)


@pytest.mark.full
def test_megatrons_own_checkpoints_are_written_and_loaded(tmp_path: Path) -> None:
    require_exact_through_checkpoints(tmp_path)


@pytest.mark.full
def test_a_save_to_slow_storage_is_no_hang(tmp_path: Path) -> None:
    limits = ("--set", "runtime.heartbeat_s=5", "--set", "runtime.progress_s=6")
    saving = (
        "--save",
        str(tmp_path / "saved"),
        "--save-interval",
        str(NUM_ITERS),
        "--ckpt-format",
        "torch_dist",
    )
    slow = Job(
        name="slow",
        options=(*OPTIONS["moevement"], *limits),
        arguments=(*saving, "--storage-takes-s", "12"),
        script=CLIENT,
    )
    ended = run_jobs(tmp_path, slow)["slow"]
    assert ended.status == 0, ended.log
    assert ended.num_processes == [1] * 4
    assert (tmp_path / "saved" / f"iter_{NUM_ITERS:07d}").exists()


@pytest.mark.full
def test_a_job_that_could_not_be_exact_ends_before_it_builds(tmp_path: Path) -> None:
    idle = tmp_path / "idle.py"
    idle.write_text('if __name__ == "__main__":\n    print("no training here")\n')
    loop = tmp_path / "swift" / "megatron" / "trainers" / "base.py"
    loop.parent.mkdir(parents=True)
    loop.write_text("")
    swift = tmp_path / "of_swift.py"
    swift.write_text(
        'if __name__ == "__main__":\n    import swift.megatron.trainers.base\n'
    )
    options = OPTIONS["moevement"]
    ended = run_jobs(
        tmp_path,
        Job(name="loop of swift", options=options, script=str(swift)),
        Job(name="counting", options=options, arguments=("--log-num-zeros-in-grad",)),
        Job(name="boosted", options=("--ckpt", "moetion")),
        Job(name="idle", options=options, script=str(idle)),
    )
    messages = {
        "loop of swift": (
            "moe_ckpt.run: got ms-swift's training loop (swift.megatron.trainers.base),"
            " wanted --lo"
        ),
        "counting": (
            "--log-num-zeros-in-grad: got True, wanted False or None with moe_ckpt.run:"
            " the split optimizer"
        ),
        "boosted": "ckpt.boost: got 0.1, wanted 0 with moe_ckpt.run",
        "idle": (
            "wanted a program that calls megatron.training's pretrain: nothing was"
            " protected"
        ),
    }
    for name, message in messages.items():
        assert ended[name].status == 1
        assert ended[name].log.count(message) == 1, "from the first rank that meets it"
        assert "Traceback" not in ended[name].log
