"""`moe-ckpt prove` observes each loop by the seams of the loop.

The observed digests are the digests in a plain run's own log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.prove.compare import read_digests
from scripts.fetch_megatron_lm import BRIDGE_TAG, FOLDER, SWIFT_TAG, sources_of
from tests.harness.jobs.attached_jobs import (
    BRIDGE,
    EXAMPLE,
    NUM_ITERS,
    NUM_RANKS,
    SWIFT,
    Job,
    run_jobs,
)
from tests.harness.jobs.exact_attached_jobs import PLAIN

HERE = Path(__file__).parent
LOOPS: dict[str, dict[str, Any]] = {
    "megatron-lm": {"script": EXAMPLE, "options": ()},
    BRIDGE_TAG: {"script": HERE / "bridge_recipe.py", "options": BRIDGE},
    SWIFT_TAG: {"script": HERE / "swift_recipe.py", "options": SWIFT},
}


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_without_an_attachment_is_observed(tmp_path: Path, loop: str) -> None:
    """The test needs a real job.

    The hook waits for the loop's own modules, and observes the loop's iterations.
    """
    if not FOLDER.exists() or (
        loop in (BRIDGE_TAG, SWIFT_TAG) and not sources_of(loop).exists()
    ):
        pytest.skip(f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {loop}")
    job = Job(
        name="plain",
        options=(
            *PLAIN.options,
            "--set=run.digest_tensors=true",
            *LOOPS[loop]["options"],
        ),
        script=str(LOOPS[loop]["script"]),
        is_observed=True,
    )
    ended = run_jobs(tmp_path, job)["plain"]
    assert ended.status == 0, ended.log
    observed = read_digests(ended.run.with_name("observed"))
    assert len(observed.tensors) == NUM_ITERS * NUM_RANKS
    assert observed.tensors == read_digests(ended.run).tensors
