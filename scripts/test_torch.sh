#!/usr/bin/env bash
# Run tests against another build of torch than the installed one: process groups,
# the engine, exactness, the ends of jobs, and the demo.
#
#     scripts/test_torch.sh 2.13.0                the build that PyPI has, with CUDA
#     scripts/test_torch.sh 2.11.0 tests/engine   some tests, without the demo
#
# PyPI's build also has to work on a machine without a GPU: it looks for one, and so
# behaves unlike a CPU build. It is installed beside the environment, which stays as it
# is, and takes 5 GB; SITE names a folder that keeps it for the next call.
set -euo pipefail
version=${1:?usage: scripts/test_torch.sh VERSION [pytest arguments]}
shift
cd "$(dirname "$0")/.."
python=.venv/bin/python
site=${SITE:-$(mktemp -d)}
[ -n "${SITE:-}" ] || trap 'rm -rf "$site"' EXIT

if [ ! -d "$site/torch" ]; then
    # `==` would also take a build with a local version, such as 2.13.0+cpu
    "$python" -m pip -qq --disable-pip-version-check install --target "$site" "torch===$version"
fi
export PYTHONPATH="$site:$PWD"
"$python" -W ignore -c 'import torch; print("torch", torch.__version__, "from", torch.__path__[0])'
if [ $# -gt 0 ]; then
    "$python" -m pytest "$@"
    exit
fi
"$python" -m pytest -n 2 --dist worksteal tests/elastic tests/engine tests/megatron/test_replay.py \
    tests/launcher/test_exact.py tests/launcher/test_elastic_ends.py tests/launcher/test_formats.py
"$python" -m launcher.demo
