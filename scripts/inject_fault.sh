#!/usr/bin/env bash
# Inject faults into a running job. Without options: kill one random worker of the
# newest run. --help lists all options.
#
#     scripts/inject_fault.sh [--rank 2] [--at-iteration 17 --phase backward]
#         [--mtbf 30s --count 5] ...
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python
exec "$python" -m launcher.inject_fault "$@"
