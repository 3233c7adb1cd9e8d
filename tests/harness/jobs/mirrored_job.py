"""launcher/train.py with a witness of servers' states, for torchrun to start.

    mirrored_job.py FOLDER OVERRIDES

The digests of states are written to FOLDER (tests/harness/jobs/captured_states.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_ckpt.agent import end_with_agent

if __name__ == "__main__":
    # the checkout in place of this folder, whose modules are no top-level modules
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    end_with_agent()
    from launcher.train import main
    from tests.harness.jobs.captured_states import note_states

    note_states(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
