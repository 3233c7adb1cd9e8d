#!/usr/bin/env bash
# Run the exactness and seam tests against another megatron-core than the installed one:
#
#     scripts/test_megatron.sh 0.19.2
#
# The wheel is unpacked beside the environment, not installed into it, so that a version that asks for a newer Python
# can be tried on this one. Megatron-core 0.17 and later import triton, which is put there too.
set -euo pipefail
version=${1:?usage: scripts/test_megatron.sh VERSION [pytest arguments]}
shift
cd "$(dirname "$0")/.."
python=.venv/bin/python
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT

fetch() { "$python" -m pip -qq --disable-pip-version-check download --no-deps --only-binary=:all: -d "$target" "$@"; }
fetch "megatron-core==$version" 2>/dev/null || fetch --python-version 3.12 "megatron-core==$version"
"$python" -m zipfile -e "$target"/megatron_core-*.whl "$target/site"
"$python" -m pip -qq --disable-pip-version-check install --no-deps --target "$target/site" triton

export PYTHONPATH="$target/site"
"$python" -W ignore -c 'import megatron.core; print("megatron-core", megatron.core.__version__, "from", megatron.core.__path__[0])'
"$python" -m pytest tests/megatron tests/launcher/test_exact.py tests/launcher/test_formats.py tests/launcher/test_reshard.py "$@"
