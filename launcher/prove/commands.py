"""A user's training command, and the same command with the settings of one run.

Pure. There are three kinds: `moe_ckpt.run` with its options (`moe-ckpt run`),
launcher/train.py with its overrides (`moe-ckpt train`), and any other command with
MOE_CKPT in the environment.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from launcher.config import compose_settings
from launcher.overrides import make_parser, parse
from launcher.start_train import parse_train
from moe_ckpt.config import require, wants_supervisor
from moe_ckpt.door import VARIABLE, attached_command
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.run_settings import parse_options, parse_run, run_words
from moe_ckpt.start_run import parse_start
from moe_ckpt.torchrun_options import torchrun_words

NOTHING, MOMENTS = "nothing", "moments"
_DIGESTS = {"run.digest_every_iters": "1", "run.digest_tensors": "true"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """One run of the command."""

    run: Path
    """The run folder."""

    is_plain: bool = False
    """Whether the run has no supervisors and no policy."""

    losses: tuple[StateLoss, ...] = ()
    """Losses of state in living processes."""

    leave_out: str = NOTHING
    """The ingredient that recoveries of the run lack: `nothing` or `moments`."""

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the run, by name."""
        return {"run.dir": str(self.run), **_DIGESTS, "run.leave_out": self.leave_out}


class CheckedCommand(Protocol):
    """A command that a proof can run."""

    @property
    def loses_state(self) -> bool:
        """Whether the policy recovers states that are lost in living processes."""
        ...

    @property
    def loses_tokens(self) -> bool:
        """Whether a recovery may bring tensors back to different iterations."""
        ...

    def varied(self, variation: Variation) -> list[str]:
        """Return the words of the command for one run."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedCommand:
    """A script under `moe_ckpt.run`."""

    start: tuple[str, ...]
    """The words up to the options of `moe_ckpt.run`."""

    options: tuple[str, ...]
    """The options of `moe_ckpt.run`."""

    program: tuple[str, ...]
    """The script with its arguments."""

    loses_state: bool
    """Whether the policy recovers states that are lost in living processes."""

    loses_tokens: bool
    """Whether a recovery may bring tensors back to different iterations."""

    def varied(self, variation: Variation) -> list[str]:
        ours = [f"--set={key}={value}" for key, value in variation.settings.items()]
        if variation.losses:
            ours.append(f"--set=run.lose={_as_yaml(variation.losses)}")
        plain = ["--plain"] if variation.is_plain else []
        return [*self.start, *self.options, *ours, *plain, "--", *self.program]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentCommand:
    """A command to which MOE_CKPT attaches."""

    attached: AttachedCommand
    """The options, which the variable has in each run."""

    words: tuple[str, ...]
    """The words of the command."""

    @property
    def loses_state(self) -> bool:
        return self.attached.loses_state

    @property
    def loses_tokens(self) -> bool:
        return self.attached.loses_tokens

    def varied(self, variation: Variation) -> list[str]:
        options = self.attached.varied(variation)[:-1]  # without `--`
        return ["env", f"{VARIABLE}={shlex.join(options)}", *self.words]


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherCommand:
    """The launcher with its overrides. Faults of the command itself are left out."""

    start: tuple[str, ...]
    """The words up to the overrides."""

    overrides: tuple[str, ...]
    """The overrides."""

    loses_state: bool
    """Whether the policy recovers states that are lost in living processes."""

    loses_tokens: bool
    """Whether a recovery may bring tensors back to different iterations."""

    def varied(self, variation: Variation) -> list[str]:
        replaced = ("fault", *variation.settings)
        kept = [
            word
            for word in self.overrides
            if not any(_sets(word, name) for name in replaced)
        ]
        if variation.is_plain:
            # settings of the policy are unknown keys for `ckpt=none`, which also has no
            # supervisors
            kept = [
                word
                for word in kept
                if not _sets(word, "ckpt") and not _sets(word, "runtime.guard")
            ]
            kept.append("ckpt=none")
        settings = [f"{key}={value}" for key, value in variation.settings.items()]
        losing = (
            ["fault=state_loss", f"fault.at={_as_yaml(variation.losses)}"]
            if variation.losses
            else []
        )
        return [*self.start, *kept, *settings, *losing]


def parse_command(words: Sequence[str], variable: str = "") -> CheckedCommand | None:
    """Return the attached command that these words are.

    Args:
        words: The words of the command.
        variable: The value of MOE_CKPT.

    Returns:
        The command; None if the words have no attachment.

    Raises:
        ConfigError: The attachment has no policy that recovers, or has wrong settings.
    """
    if variable and words:
        attached = _attached((), attached_command(variable, ["python", "SCRIPT"])[2:])
        return EnvironmentCommand(
            attached=replace(attached, program=()), words=tuple(words)
        )
    for at, (first, second) in enumerate(pairwise(words)):
        if (first, second) == ("-m", "moe_ckpt.run"):
            return _attached(words[: at + 2], words[at + 2 :])
        if Path(first).name == "moe-ckpt" and second == "run":
            options, program = parse_start(words[at + 2 :])
            start = [*words[: at + 2], *torchrun_words(options)]
            return _attached(start, [*run_words(options), "--", *program])
        if Path(first).name == "moe-ckpt" and second == "train":
            options = parse_train(words[at + 2 :])
            return _launched(
                [*words[: at + 2], *torchrun_words(options)], options.overrides
            )
    for at, word in enumerate(words):
        if Path(word).parts[-2:] == ("launcher", "train.py"):
            options = parse(make_parser("launcher/train.py", ""), words[at + 1 :])
            return _launched(words[: at + 1], options.overrides)
    return None


def _attached(start: Sequence[str], words: Sequence[str]) -> AttachedCommand:
    settings = parse_run(words)
    ckpt = settings.job.ckpt
    options, program = parse_options(words)
    require(
        not settings.is_plain,
        "COMMAND: policy",
        ckpt.policy,
        "one that recovers, and no --plain",
    )
    return AttachedCommand(
        start=tuple(start),
        options=tuple(run_words(options)),
        program=tuple(program),
        loses_state=ckpt.recovers_locally,
        loses_tokens=ckpt.loses_tokens,
    )


def _launched(start: Sequence[str], overrides: Sequence[str]) -> LauncherCommand:
    settings = compose_settings(overrides)
    recovers = wants_supervisor(settings.ckpt, settings.runtime)
    require(
        recovers,
        "COMMAND: policy",
        settings.ckpt.policy,
        "one whose supervisors replace a killed worker",
    )
    return LauncherCommand(
        start=tuple(start),
        overrides=tuple(overrides),
        loses_state=settings.ckpt.recovers_locally,
        loses_tokens=settings.ckpt.loses_tokens,
    )


def _sets(word: str, group: str) -> bool:
    """Return whether an override chooses or changes this group or key."""
    key = word.partition("=")[0].lstrip("+~")
    return key == group or key.startswith(f"{group}.")


def _as_yaml(losses: Sequence[StateLoss]) -> str:
    """Return losses in YAML's flow style, for Hydra's overrides and `--set`."""
    return json.dumps([asdict(loss) for loss in losses]).replace('"', "")
