#!/usr/bin/env bash
# Run tests against another torch than the installed one, by default those of process groups and exactness:
#
#     scripts/test_torch.sh 2.11.0 [pytest arguments]
#
# The bounds are those of pyproject.toml; CI has the newest. The release is installed beside the environment, which stays as
# it is; SITE names a folder that keeps it for the next call. A release without a build for CPUs brings CUDA's libraries,
# some GB.
set -euo pipefail
version=${1:?usage: scripts/test_torch.sh VERSION [pytest arguments]}
shift
cd "$(dirname "$0")/.."
python=.venv/bin/python
site=${SITE:-$(mktemp -d)}
[ -n "${SITE:-}" ] || trap 'rm -rf "$site"' EXIT

if [ ! -d "$site/torch" ]; then
    "$python" -m pip -qq --disable-pip-version-check install --target "$site" "torch==$version"
fi
export PYTHONPATH="$site:$PWD"
"$python" -W ignore -c 'import torch; print("torch", torch.__version__, "from", torch.__path__[0])'
if [ $# -eq 0 ]; then
    set -- tests/elastic tests/megatron/test_replay.py tests/launcher/test_exact.py
fi
"$python" -m pytest "$@"
