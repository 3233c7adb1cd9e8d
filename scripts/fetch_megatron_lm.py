"""Put Megatron-LM into the environment, for tests.

    python scripts/fetch_megatron_lm.py                             the training package
                                                                    of a released wheel
    python scripts/fetch_megatron_lm.py core_v0.19.0 core_v0.18.2   and the unchanged
                                                                    sources of these
                                                                    tags
    python scripts/fetch_megatron_lm.py v0.6.0 v4.5.2               and the sources of a
                                                                    tag of
                                                                    Megatron-Bridge and
                                                                    one of ms-swift

The wheel of megatron-core 0.19.2 contains `megatron.training`. The wheel requires
Python 3.12, so the script does not install the wheel, but unpacks the wheel into a
folder of the virtual environment. The compiled data set helpers come from the installed
megatron-core, so that other releases of Python can use the folder. The sources of a tag
are cloned beside that folder, from `--source` if given. If the wheel or sources cannot
be had, the script prints the reason, and tests that need the missing files are skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

VERSION = "0.19.2"
TAGS, BRIDGE_TAG, SWIFT_TAG = ("core_v0.19.0", "core_v0.18.2"), "v0.6.0", "v4.5.2"
FOLDER = Path(sys.prefix) / f"megatron-lm-{VERSION}"
_LM, _BRIDGE, _SWIFT = "megatron-lm", "megatron-bridge", "ms-swift"
_SOURCES = {
    _LM: "https://github.com/NVIDIA/Megatron-LM.git",
    _BRIDGE: "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git",
    _SWIFT: "https://github.com/modelscope/ms-swift.git",
}
_DOWNLOAD_S = 600
# packages that megatron-core 0.17 and later, and its writer of checkpoints, import
_IMPORTED = ("triton", "psutil")
_SITECUSTOMIZE = """# Python imports this at its start: the wheel asks for typing.override, which is new in 3.12
import typing
import typing_extensions
typing.override = typing_extensions.override
"""


def sources_of(tag: str) -> Path:
    """Return the folder of a tag's sources.

    Packages that the sources import, other than Megatron, are in the wheel's folder.
    """
    return FOLDER.with_name(f"{_repository_of(tag)}-{tag}")


def _repository_of(tag: str) -> str:
    return (
        _LM if tag.startswith("core_") else _SWIFT if tag.startswith("v4.") else _BRIDGE
    )


def main(arguments: Sequence[str]) -> int:
    """Fetch the wheel, and the sources of the tags in the arguments.

    Returns:
        1 if the sources of a tag are missing afterwards, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tags",
        nargs="*",
        metavar="TAG",
        help=f"a tag; tests use {', '.join((*TAGS, BRIDGE_TAG, SWIFT_TAG))}",
    )
    parser.add_argument(
        "--source",
        metavar="URL",
        help="the repository with the tags, in place of that on GitHub",
    )
    wanted = parser.parse_args(arguments)
    _put(FOLDER, _unpack)
    there = [
        _put(
            sources_of(tag), lambda folder, tag=tag: _clone(folder, wanted.source, tag)
        )
        for tag in wanted.tags
    ]
    return 0 if all(there) else 1


def _put(folder: Path, make: Callable[[Path], Path]) -> bool:
    """Make a folder if missing, and return whether the folder is there now.

    Args:
        folder: The folder, which is complete or absent.
        make: Called with a temporary folder beside `folder`; makes a folder in the
            temporary folder and returns the made folder, which becomes `folder`.
    """
    if folder.exists():
        return True
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            make(Path(name)).rename(folder)
    except (
        OSError,
        subprocess.SubprocessError,
        zipfile.BadZipFile,
        RuntimeError,
    ) as error:
        print(
            f"no {folder.name} for tests, those that need it are skipped: {error}",
            file=sys.stderr,
        )
        return False
    return True


def _unpack(folder: Path) -> Path:
    """Return a folder with the packages of the wheel.

    Also with packages that the wheel imports and the environment lacks.
    """
    python = ["--python-version", "3.12"] if sys.version_info < (3, 12) else []
    _pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        *python,
        f"megatron-core=={VERSION}",
        "--dest",
        str(folder),
    )
    wheel, site = next(folder.glob("megatron_core-*.whl")), folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    if sys.version_info < (3, 12):
        (site / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    _add_dataset_helpers(site)
    missing = [name for name in _IMPORTED if importlib.util.find_spec(name) is None]
    if missing:
        _pip("install", "--no-deps", "--target", str(site), *missing)
    return site


def _clone(folder: Path, source: str | None, tag: str) -> Path:
    """Return a folder with the unchanged sources of a tag.

    Sources of Megatron-LM get the compiled data set helpers in addition.
    """
    sources = folder / "sources"
    clone = (
        "git",
        "-c",
        "advice.detachedHead=false",
        "clone",
        "-q",
        "--depth",
        "1",
        "--branch",
        tag,
    )
    repository = _repository_of(tag)
    subprocess.run(
        [*clone, source or _SOURCES[repository], str(sources)],
        check=True,
        timeout=_DOWNLOAD_S,
    )
    if repository == _LM:
        _add_dataset_helpers(sources)
    return sources


def _add_dataset_helpers(site: Path) -> None:
    for helpers in _installed_datasets().glob("helpers_cpp*.so"):
        shutil.copy(helpers, site / "megatron" / "core" / "datasets")


def _installed_datasets() -> Path:
    spec = importlib.util.find_spec("megatron.core.datasets")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("megatron-core: not installed in this environment")
    return Path(next(iter(spec.submodule_search_locations)))


def _pip(*arguments: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "-qq",
        "--disable-pip-version-check",
        *arguments,
    ]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
