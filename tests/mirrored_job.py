"""launcher/train.py with a witness of servers' states, for torchrun to start.

    mirrored_job.py FOLDER OVERRIDES

The digests of states are written to FOLDER (tests/captured_states.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from moe_ckpt.agent import end_with_agent

if __name__ == "__main__":
    # the checkout in place of tests/, which has packages with the names of libraries
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    end_with_agent()
    from launcher.train import main
    from tests.captured_states import note_states

    note_states(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
