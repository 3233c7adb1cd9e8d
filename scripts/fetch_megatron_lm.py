"""Put Megatron-LM's training package into the environment, for tests: `python scripts/fetch_megatron_lm.py`.

The wheel of megatron-core 0.19.2 contains `megatron.training`. It asks for Python 3.12, so it is unpacked into a folder
of the virtual environment, not installed; on another Python the compiled data set helpers come from the installed
megatron-core. Where it cannot be had this says why, and tests that need it are skipped.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.19.2"
FOLDER = Path(sys.prefix) / f"megatron-lm-{VERSION}"
_DOWNLOAD_S = 600
_IMPORTED = ("triton", "psutil")  # by megatron-core 0.17 and later, and by its writer of checkpoints
_SITECUSTOMIZE = """# Python imports this at its start: the wheel asks for typing.override, which is new in 3.12
import typing
import typing_extensions
typing.override = typing_extensions.override
"""


def main() -> int:
    if FOLDER.exists():
        return 0
    try:
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as name:
            site = _unpack(Path(name))
            site.rename(FOLDER)
    except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, RuntimeError) as error:
        print(f"no Megatron-LM for tests, those that need it are skipped: {error}", file=sys.stderr)
    return 0


def _unpack(folder: Path) -> Path:
    """Return a folder with the wheel's packages, and with those that it imports and the environment lacks."""
    python = ["--python-version", "3.12"] if sys.version_info < (3, 12) else []
    _pip("download", "--no-deps", "--only-binary=:all:", *python, f"megatron-core=={VERSION}", "--dest", str(folder))
    wheel, site = next(folder.glob("megatron_core-*.whl")), folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    if sys.version_info < (3, 12):
        (site / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    for helpers in _installed_datasets().glob("helpers_cpp*.so"):
        shutil.copy(helpers, site / "megatron" / "core" / "datasets")
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if missing:
        _pip("install", "--no-deps", "--target", str(site), *missing)
    return site


def _installed_datasets() -> Path:
    spec = importlib.util.find_spec("megatron.core.datasets")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("megatron-core: not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_S)


if __name__ == "__main__":
    sys.exit(main())
