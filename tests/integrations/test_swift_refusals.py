"""Refusals of the attachment to ms-swift before a model is built.

The attachment refuses trainers, arguments, and seams that have moved.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import tests.preload  # noqa: F401 - imports Megatron without its warnings
from moe_ckpt.errors import ConfigError
from moe_ckpt.integrations import ms_swift_options as options
from moe_ckpt.integrations import ms_swift_seams as seams
from moe_ckpt.integrations.loop_seams import require_seams
from moe_ckpt.integrations.megatron_lm_options import REFUSALS, Refusal

FINE = {"tuner_type": "full", "task_type": "causal_lm", "optimizer": "adam"}


@pytest.mark.parametrize(
    "refusal", [*options._OWN, *REFUSALS], ids=lambda refusal: refusal.option
)
def test_each_argument_that_cannot_be_exact_is_refused(refusal: Refusal) -> None:
    options.require_supported(options.TRAINER, SimpleNamespace(**FINE))
    got = True if False in refusal.allowed else "another"
    with pytest.raises(ConfigError) as error:
        options.require_supported(
            options.TRAINER, SimpleNamespace(**FINE | {refusal.option: got})
        )
    assert str(error.value).startswith(f"--{refusal.option}: got {got!r}, wanted ")
    assert str(error.value).endswith(refusal.reason)


def test_another_trainer_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^ms-swift's trainer: got 'MegatronDPOTrainer', wanted MegatronTrainer",
    ):
        options.require_supported("MegatronDPOTrainer", SimpleNamespace(**FINE))


def trainer(without: str = "", moved: str = "") -> Any:
    """Return a fake trainer with all seams.

    Args:
        without: Name of a function that the trainer lacks. Empty: none.
        moved: Name of a function with other parameters and calls. Empty: none.
    """
    names: dict[str, Any] = {}
    for function in {**seams._PARAMETERS, **seams._CALLS}:
        body = (
            " + ".join(f"self.{each}" for each in seams._CALLS.get(function, ())) or "0"
        )
        parameters = ", ".join(seams._PARAMETERS.get(function, ("self",)))
        exec(f"def {function}({parameters}): return {body}", names)
    methods = {
        name: names[name]
        for name in {**seams._PARAMETERS, **seams._CALLS}
        if name != without
    }
    return type("MegatronTrainer", (), methods | ({moved: lambda: 0} if moved else {}))


@pytest.mark.parametrize("name", {**seams._PARAMETERS, **seams._CALLS})
def test_a_seam_of_ms_swift_that_moved_is_named(name: str) -> None:
    tables = seams._PARAMETERS, seams._CALLS, "ms-swift 4.5"
    require_seams(trainer(), *tables)
    with pytest.raises(
        ConfigError,
        match=rf"MegatronTrainer\.{name}: got another function .* as in ms-swift 4\.5",
    ):
        require_seams(trainer(moved=name), *tables)
    if name != "__init__":  # every class has this function
        with pytest.raises(
            ConfigError,
            match=rf"MegatronTrainer\.{name}: got nothing, wanted the function",
        ):
            require_seams(trainer(without=name), *tables)
