"""A hook of mkdocs (mkdocs.yml): pages from outside docs/, and links to other files.

The pages of docs/ link to files outside docs/ (`../conf/ckpt`, `../CONTRIBUTING.md`),
which a browser of the repository opens. Some of these files are pages of the site, too.
A link to another file leads to the repository if mkdocs.yml has a `repo_url`; without
one the link becomes the path of the file.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ADDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/under_faults_capped.svg": "under_faults_capped.svg",
}
"""Files outside docs/ that the site has: path in the repository, path in the site."""

_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)]*)?\)"
)


def on_files(files: Any, *, config: Any) -> None:
    """Add files from outside docs/ to the site.

    Args:
        files: The files of mkdocs, to which this function appends.
        config: The configuration of mkdocs.
    """
    # a test imports this module for the links alone, without mkdocs
    from mkdocs.structure.files import File  # noqa: PLC0415

    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page.

    Args:
        markdown: The source of the page.
        page: The page of mkdocs.
        config: The configuration of mkdocs.

    Returns:
        The source with links that the site can follow.
    """
    uri = page.file.src_uri
    path = next((path for path, added in ADDED.items() if added == uri), f"docs/{uri}")
    return rewrite_links(markdown, path, config.repo_url)


def rewrite_links(markdown: str, path: str, repo_url: str | None) -> str:
    """Rewrite relative links of a file to what the site has.

    Args:
        markdown: The text of the file.
        path: The path of the file in the repository.
        repo_url: Where the repository is published; None if it is not.

    Returns:
        The text with links to pages of the site, to `repo_url`, or without a link.
    """

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(path), link["target"])
        )
        anchor, label = link["anchor"] or "", f"{link['image']}[{link['text']}]"
        if target in ADDED:
            return f"{label}({ADDED[target]}{anchor})"
        if target.startswith("docs/"):
            return f"{label}({target.removeprefix('docs/')}{anchor})"
        if repo_url:
            return f"{label}({repo_url.rstrip('/')}/blob/main/{target}{anchor})"
        text = link["text"]
        return f"`{target}`" if text.strip("`") in target else f"{text} (`{target}`)"

    return _LINK.sub(rewritten, markdown)
