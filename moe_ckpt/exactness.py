"""The promise of recoveries, and its conditions for kernels and policies. Pure.

`bitwise`: a run with faults ends bit for bit where the run without faults ends. Kernels
must repeat an iteration bit for bit, which on a GPU only deterministic kernels do. Any
policy can keep this promise.

`state`: after a recovery the state of every rank is, bit for bit, one that the rank had
before the fault. Kernels need not repeat results, but a recovery must not run an
iteration again: the outcome would differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moe_ckpt.config import (
    AUTO,
    CKPT_CONFIGS,
    GRADIENTS,
    REPLAY,
    CkptConfig,
    MoevementConfig,
    require,
    require_choice,
)
from moe_ckpt.faults.schedule import StateLoss

BITWISE, STATE = "bitwise", "state"
SETTING = "run.exactness"
"""Name of the setting, for messages."""


def require_valid(exactness: str, *, may_be_auto: bool) -> None:
    """Raise ConfigError for a value that `run.exactness` cannot have.

    Args:
        exactness: The value.
        may_be_auto: Whether the loop's own settings may decide between the two
            promises.

    Raises:
        ConfigError: The value is not allowed.
    """
    require_choice(
        SETTING, exactness, [*([AUTO] if may_be_auto else []), BITWISE, STATE]
    )


def with_recovery(ckpt: CkptConfig, exactness: str) -> CkptConfig:
    """Return a policy whose way of recovery is decided.

    Args:
        ckpt: The policy.
        exactness: The promise of the run. While it is `auto`, nothing is decided.
    """
    if exactness == AUTO or not isinstance(ckpt, MoevementConfig):
        return ckpt
    if ckpt.recovery != AUTO:
        return ckpt
    by_gradients = exactness == STATE and not ckpt.paper_exact
    return replace(ckpt, recovery=GRADIENTS if by_gradients else REPLAY)


def require_kept(
    exactness: str,
    ckpt: CkptConfig,
    losses: Sequence[StateLoss],
    check_determinism: bool | str,
) -> None:
    """Refuse settings under which recoveries cannot keep a promise.

    Args:
        exactness: The promise.
        ckpt: The policy, as `with_recovery` returns it.
        losses: Losses of state in living processes, on purpose.
        check_determinism: Whether a pass is run twice to compare gradients.

    Raises:
        ConfigError: The promise is `state`, and a recovery would run iterations again,
            or passes would be compared.
    """
    if exactness != STATE:
        return
    require(not ckpt.replays, SETTING, exactness, f"{BITWISE} {_why_not(ckpt)}")
    wanted = (
        f"{BITWISE}, or no losses of state (fault=state_loss, run.lose): a replay"
        " rebuilds such a state"
    )
    require(not losses or ckpt.logs_gradients, SETTING, exactness, wanted)
    wanted = (
        f"{AUTO} or false with {SETTING}={STATE}, under which two passes may differ"
    )
    require(
        check_determinism is not True, "check_determinism", check_determinism, wanted
    )


def resolve_exactness(
    asked: str, ckpt: CkptConfig, *, on_gpu: bool, mode: bool, option: str | None
) -> str:
    """Return the promise of a run of a loop that is not ours.

    Args:
        asked: The setting: `auto`, `bitwise` or `state`.
        ckpt: The policy.
        on_gpu: Whether the loop trains on a GPU.
        mode: Whether the loop's own deterministic mode is on.
        option: Name of that mode's option; None if the loop has no such mode.

    Returns:
        `bitwise` or `state`: with `auto` the strongest promise that the kernels allow.

    Raises:
        ConfigError: The loop's kernels do not repeat results, and `bitwise` was
            requested or the policy's recoveries run iterations again.
    """
    if asked == STATE:
        return STATE
    if not on_gpu or mode:
        return BITWISE
    if asked == BITWISE:
        wanted = (
            f"True with {SETTING}={BITWISE}: on a GPU only deterministic kernels repeat"
            " an iteration bit for bit"
        )
        require(option is None, str(option), mode, wanted)
        return BITWISE
    name, got, wanted = (
        (SETTING, asked, BITWISE) if option is None else (option, mode, True)
    )
    ckpt = with_recovery(ckpt, STATE)
    require(not ckpt.replays, name, got, f"{wanted} {_why_not(ckpt)}")
    return STATE


def describe(exactness: str, ckpt: CkptConfig) -> str:
    """Return one line about the promise of a run, for the log."""
    if exactness == BITWISE:
        promise = "a run under faults ends bit for bit where the run without them ends"
    else:
        promise = (
            "after a recovery each rank has, bit for bit, a state that it had before"
            " the fault"
        )
    if ckpt.loses_tokens:
        promise += "; experts that snapshots leave out go back further"
    if ckpt.logs_gradients:
        promise += f" (ckpt.recovery={GRADIENTS})"
    return f"{SETTING}={exactness}: {promise}"


def _why_not(ckpt: CkptConfig) -> str:
    others = [
        name
        for name, kind in CKPT_CONFIGS.items()
        if not kind.recovers_locally and name != "none"
    ]
    return (
        f"with ckpt={ckpt.policy} and ckpt.recovery={REPLAY}, whose recoveries run"
        f" iterations again ({SETTING}={STATE} is for ckpt.recovery={AUTO} or"
        f" {GRADIENTS}, and for {', '.join(others)})"
    )
