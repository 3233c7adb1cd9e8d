"""Trains as examples/own_loop.py does, for longer, in a job with a spare node."""

import importlib.util
import sys
from typing import Any

from moe_ckpt.run_settings import runtime_config
from tests.scenarios import ROOT

EXAMPLE = ROOT / "examples" / "own_loop.py"
# a busy machine is slow, and loses no rank for that
PATIENT = {"progress_s": 300.0, "operation_s": 400.0, "join_s": 900.0}


def main() -> int:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec
    assert spec.loader
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    configured = example.LoopConfig
    example.NUM_ITERATIONS = 100
    example.LoopConfig = lambda **options: configured(
        **options | {"runtime": runtime_config(spare_nodes=1, **PATIENT)}
    )
    return example.main()


if __name__ == "__main__":
    sys.exit(main())
