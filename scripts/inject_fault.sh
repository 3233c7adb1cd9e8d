#!/usr/bin/env bash
# Inject faults into a running job; without options, kill one random worker of the newest run:
#
#     scripts/inject_fault.sh [--rank 2] [--at-iteration 17 --phase backward] [--mtbf 30s --count 5] ... (--help)
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python
exec "$python" -m launcher.inject_fault "$@"
