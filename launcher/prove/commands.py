"""A user's own training command, and the same command with the settings of one run of a
check. Pure.

Three kinds: `moe_ckpt.run` with its options (`moe-ckpt run`), launcher/train.py with
its overrides (`moe-ckpt train`), and any other command with MOE_CKPT in the
environment.
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
    """One run of the command, in the folder `run`. `leave_out`: the ingredient that its
    recoveries lack.
    """

    run: Path
    is_plain: bool = False
    losses: tuple[StateLoss, ...] = ()
    leave_out: str = NOTHING

    @property
    def settings(self) -> dict[str, str]:
        return {"run.dir": str(self.run), **_DIGESTS, "run.leave_out": self.leave_out}


class CheckedCommand(Protocol):
    """A command that a check can run."""

    @property
    def loses_state(self) -> bool:
        """Whether the policy recovers states that are lost in living processes."""
        ...

    @property
    def loses_tokens(self) -> bool:
        """Whether a recovery may bring some tensors back to older iterations than
        others.
        """
        ...

    def varied(self, variation: Variation) -> list[str]:
        """Return the command of one run."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedCommand:
    """A script under `moe_ckpt.run`."""

    start: tuple[str, ...]
    options: tuple[str, ...]
    program: tuple[str, ...]
    loses_state: bool
    loses_tokens: bool

    def varied(self, variation: Variation) -> list[str]:
        ours = [f"--set={key}={value}" for key, value in variation.settings.items()]
        if variation.losses:
            ours.append(f"--set=run.lose={_as_yaml(variation.losses)}")
        plain = ["--plain"] if variation.is_plain else []
        return [*self.start, *self.options, *ours, *plain, "--", *self.program]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentCommand:
    """A command that MOE_CKPT attaches to: the variable has the options of each run."""

    attached: AttachedCommand
    words: tuple[str, ...]

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
    """The launcher with its overrides; its own faults are left out."""

    start: tuple[str, ...]
    overrides: tuple[str, ...]
    loses_state: bool
    loses_tokens: bool

    def varied(self, variation: Variation) -> list[str]:
        replaced = ("fault", *variation.settings)
        kept = [
            word
            for word in self.overrides
            if not any(_sets(word, name) for name in replaced)
        ]
        if variation.is_plain:
            # settings of the policy are unknown keys to `none`, which has no
            # supervisors either
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
    """Return the command with an attachment that these words are, or None.

    Args:
        words: The words of the command.
        variable: The value of MOE_CKPT.

    Raises:
        ConfigError: The attachment has no policy that recovers, or wrong settings.
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
    """Return losses in the flow style of YAML, which Hydra's overrides and `--set` both
    read.
    """
    return json.dumps([asdict(loss) for loss in losses]).replace('"', "")
