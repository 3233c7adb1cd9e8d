"""Download a source release from an index of Python packages, without a build.

    python scripts/gpu/fetch_source.py NAME VERSION FOLDER

`pip download` builds the metadata of a source release. For Transformer Engine's
extension of torch, this build would download torch once more. PIP_INDEX_URL names
another index.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

_INDEX = "https://pypi.org/simple"
_LIMIT_S = 60.0
_JSON = "application/vnd.pypi.simple.v1+json"  # PEP 691


def fetch_source(name: str, version: str, folder: Path, index: str = _INDEX) -> Path:
    """Write a source release into a folder.

    Args:
        name: The name of the project.
        version: The release of the project.
        folder: The folder for the file.
        index: Address of an index that answers in JSON (PEP 691).

    Returns:
        The path of the file.

    Raises:
        ValueError: The index has no such release, or the file does not have the SHA-256
            of the index.
    """
    page_url = f"{index.rstrip('/')}/{name}/"
    wanted = f"{name.replace('-', '_')}-{version}.tar.gz"
    page = json.loads(_read(page_url, accept=_JSON))
    release = next((each for each in page["files"] if each["filename"] == wanted), None)
    if release is None:
        raise ValueError(
            f"{page_url}: got {len(page['files'])} files, wanted {wanted} among them"
        )
    content = _read(urllib.parse.urljoin(page_url, release["url"]))
    got = hashlib.sha256(content).hexdigest()
    if got != release["hashes"].get("sha256", got):
        raise ValueError(
            f"{wanted}: got a file of SHA-256 {got}, wanted"
            f" {release['hashes']['sha256']}"
        )
    target = folder / wanted
    target.write_bytes(content)
    return target


def _read(url: str, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=_LIMIT_S) as answer:
        return answer.read()


def main(arguments: Sequence[str]) -> int:
    name, version, folder = arguments
    print(
        fetch_source(
            name, version, Path(folder), os.environ.get("PIP_INDEX_URL", _INDEX)
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
