"""The promise of a run's recoveries (`run.exactness`), and settings that exclude it.

For policies, the launcher, a user's own loop, and attached loops, which decide by
default.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.config import compose_settings
from moe_ckpt.config import CKPT_CONFIGS, CkptConfig, MoevementConfig
from moe_ckpt.errors import ConfigError
from moe_ckpt.exactness import (
    BITWISE,
    STATE,
    describe,
    resolve_exactness,
    with_recovery,
)
from moe_ckpt.job_config import JobConfig
from moe_ckpt.run_settings import ckpt_config, parse_run
from tests.loop_configs import loop_config

OTHERS = [name for name in CKPT_CONFIGS if name != "moevement"]
SAVING = [name for name in OTHERS if name != "none"]
OPTION = "--deterministic-mode"


def launched(policy: str, exactness: str, *words: str) -> JobConfig:
    return compose_settings(
        [f"ckpt={policy}", f"run.exactness={exactness}", *words]
    ).job


def attached(policy: str, exactness: str, *words: str) -> JobConfig:
    options = [f"--set={word}" for word in (f"run.exactness={exactness}", *words)]
    return parse_run(["--ckpt", policy, *options, "--", "train.py"]).job


def own(policy: str, exactness: str, *words: str) -> JobConfig:
    pairs = (word.removeprefix("ckpt.").split("=") for word in words)
    changes = {name: value == "True" or value for name, value in pairs}
    return loop_config(
        policy, ckpt=ckpt_config(policy, **changes), exactness=exactness
    ).job


@pytest.mark.parametrize("way", [launched, attached, own])
def test_a_policy_that_replays_cannot_keep_the_state(
    way: Callable[..., JobConfig],
) -> None:
    assert way("gemini", STATE).exactness == STATE
    assert way("moevement", BITWISE).exactness == BITWISE
    wanted = (
        r"^run\.exactness: got 'state', wanted bitwise with ckpt=moevement and"
        r" ckpt\.recovery=replay, whose recoveries run iterations again"
        r" \(run\.exactness=state is for ckpt\.recovery=auto or gradients, and for"
        rf" {', '.join(SAVING)}\)$"
    )
    with pytest.raises(ConfigError, match=wanted):
        way("moevement", STATE, "ckpt.recovery=replay")


@pytest.mark.parametrize("policy", OTHERS)
def test_all_other_policies_keep_either(policy: str) -> None:
    assert own(policy, STATE).exactness == STATE
    assert own(policy, BITWISE).exactness == BITWISE


@pytest.mark.parametrize("way", [launched, attached, own])
@pytest.mark.parametrize("recovery", ["auto", "gradients"])
def test_logged_gradients_keep_the_state(
    recovery: str, way: Callable[..., JobConfig]
) -> None:
    job = way("moevement", STATE, f"ckpt.recovery={recovery}")
    assert with_recovery(job.ckpt, STATE).logs_gradients


@pytest.mark.parametrize(
    ("asked", "exactness", "decided"),
    [
        ("auto", BITWISE, "replay"),
        ("auto", STATE, "gradients"),
        # the promise of an attached loop is not known before the loop's options
        ("auto", "auto", "auto"),
        ("replay", STATE, "replay"),
        ("gradients", BITWISE, "gradients"),
    ],
)
def test_the_promise_decides_how_moevement_recovers(
    asked: str, exactness: str, decided: str
) -> None:
    ckpt = with_recovery(ckpt_config("moevement", recovery=asked), exactness)
    assert isinstance(ckpt, MoevementConfig)
    assert ckpt.recovery == decided


def test_the_algorithm_as_printed_always_replays() -> None:
    printed = ckpt_config("moevement", paper_exact=True)
    assert with_recovery(printed, STATE).replays
    with pytest.raises(ConfigError, match=r"^run\.exactness: got 'state'"):
        own("moevement", STATE, "ckpt.paper_exact=True")
    with pytest.raises(ConfigError, match=r"^ckpt\.recovery: got 'gradients', wanted"):
        ckpt_config("moevement", paper_exact=True, recovery="gradients")


@pytest.mark.parametrize("way", [launched, own])
def test_a_loop_of_ours_leaves_nothing_to_be_decided(way) -> None:
    with pytest.raises(
        ConfigError, match=r"^run\.exactness: got 'auto', wanted one of bitwise, state$"
    ):
        way("gemini", "auto")


def test_an_attached_loop_decides_by_default() -> None:
    assert parse_run(["--", "train.py"]).job.exactness == "auto"
    with pytest.raises(
        ConfigError,
        match=r"^run\.exactness: got 'exact', wanted one of auto, bitwise, state$",
    ):
        attached("gemini", "exact")


def test_what_runs_iterations_again_excludes_the_promise_of_states() -> None:
    loss = "[{iteration: 4, stage: 0, phase: step, dp_rank: null}]"
    wanted = r"^run\.exactness: got 'state', wanted bitwise, or no losses of state"
    with pytest.raises(ConfigError, match=wanted):
        launched("gemini", STATE, "fault=state_loss", f"fault.at={loss}")
    with pytest.raises(ConfigError, match=wanted):
        attached("gemini", STATE, f"run.lose={loss}")
    wanted = (
        r"^check_determinism: got True, wanted auto or false with run\.exactness=state,"
        r" under which two passes"
    )
    with pytest.raises(ConfigError, match=wanted):
        launched("gemini", STATE, "train.check_determinism=true")


@pytest.mark.parametrize(
    ("asked", "on_gpu", "mode", "promise"),
    [
        ("auto", False, False, BITWISE),
        ("auto", True, True, BITWISE),
        ("auto", True, False, STATE),
        (STATE, True, True, STATE),
        (STATE, False, False, STATE),
        (BITWISE, False, False, BITWISE),
        (BITWISE, True, True, BITWISE),
    ],
)
def test_an_attached_loop_keeps_what_its_kernels_allow(
    asked: str, on_gpu: bool, mode: bool, promise: str
) -> None:
    assert (
        resolve_exactness(
            asked, ckpt_config("gemini"), on_gpu=on_gpu, mode=mode, option=OPTION
        )
        == promise
    )


def test_a_loop_without_a_deterministic_mode_is_made_so_on_demand_only() -> None:
    gemini = ckpt_config("gemini")
    assert (
        resolve_exactness("auto", gemini, on_gpu=True, mode=False, option=None) == STATE
    )
    assert (
        resolve_exactness(BITWISE, gemini, on_gpu=True, mode=False, option=None)
        == BITWISE
    )
    assert (
        resolve_exactness(
            BITWISE, ckpt_config("moevement"), on_gpu=True, mode=False, option=None
        )
        == BITWISE
    )


def test_moevement_needs_no_deterministic_mode_by_default() -> None:
    ckpt = ckpt_config("moevement")
    for option in (OPTION, None):
        promise = resolve_exactness(
            "auto", ckpt, on_gpu=True, mode=False, option=option
        )
        assert promise == STATE
    assert describe(STATE, with_recovery(ckpt, STATE)).endswith(
        "(ckpt.recovery=gradients)"
    )


REPLAYING = ckpt_config("moevement", recovery="replay")


@pytest.mark.parametrize(
    ("asked", "ckpt", "option", "wanted"),
    [
        (
            BITWISE,
            ckpt_config("gemini"),
            OPTION,
            (
                r"^--deterministic-mode: got False, wanted True with"
                r" run\.exactness=bitwise"
            ),
        ),
        (
            "auto",
            REPLAYING,
            OPTION,
            (
                r"^--deterministic-mode: got False, wanted True with ckpt=moevement"
                r" and ckpt\.recovery=replay, whose rec"
            ),
        ),
        (
            "auto",
            ckpt_config("moevement", paper_exact=True),
            OPTION,
            r"^--deterministic-mode: got False, wanted True with ckpt=moevement",
        ),
        (
            "auto",
            REPLAYING,
            None,
            (
                r"^run\.exactness: got 'auto', wanted bitwise with ckpt=moevement"
                r" and ckpt\.recovery=replay, whose recover"
            ),
        ),
    ],
)
def test_kernels_that_do_not_repeat_are_refused_where_they_have_to(
    asked: str, ckpt: CkptConfig, option: str | None, wanted: str
) -> None:
    with pytest.raises(ConfigError, match=wanted):
        resolve_exactness(asked, ckpt, on_gpu=True, mode=False, option=option)


def test_the_line_of_a_start_tells_both_promises_apart() -> None:
    lines = {name: describe(name, ckpt_config("gemini")) for name in (BITWISE, STATE)}
    assert lines[BITWISE].startswith(
        "run.exactness=bitwise: a run under faults ends bit for bit"
    )
    assert lines[STATE].startswith(
        "run.exactness=state: after a recovery each rank has, bit for bit, a state that"
    )
    assert describe(STATE, ckpt_config("moc")).endswith(
        "; experts that snapshots leave out go back further"
    )
