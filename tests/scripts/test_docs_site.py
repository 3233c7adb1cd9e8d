"""Links of the site's pages to files of the repository.

`make docs` proves all other links.
"""

from __future__ import annotations

import pytest

from scripts.docs_site import ADDED, ROOT, rewrite_links

REPOSITORY = "https://example.com/moe-ckpt/"


@pytest.mark.parametrize(
    ("path", "link", "without", "published"),
    [
        ("docs/a.md", "[b](b.md#c)", "[b](b.md#c)", "[b](b.md#c)"),
        ("docs/a.md", "[x](#here)", "[x](#here)", "[x](#here)"),
        ("docs/a.md", "![x](x.svg)", "![x](x.svg)", "![x](x.svg)"),
        ("docs/a.md", "<https://e.org> [x](https://e.org/a)", None, None),
        (
            "docs/a.md",
            "[help](../CONTRIBUTING.md#b)",
            "[help](contributing.md#b)",
            "[help](contributing.md#b)",
        ),
        ("benchmarks/README.md", "[p](../docs/p.md)", "[p](p.md)", "[p](p.md)"),
        (
            "docs/a.md",
            "[`conf/ckpt`](../conf/ckpt)",
            "`conf/ckpt`",
            "[`conf/ckpt`](https://example.com/moe-ckpt/blob/main/conf/ckpt)",
        ),
        (
            "benchmarks/README.md",
            "[a run](endurance_4.md#x)",
            "a run (`benchmarks/endurance_4.md`)",
            "[a run](https://example.com/moe-ckpt/blob/main/benchmarks/endurance_4.md#x)",
        ),
    ],
)
def test_a_link_leads_to_what_the_site_has(
    path: str, link: str, without: str | None, published: str | None
) -> None:
    assert rewrite_links(link, path, None) == (without or link)
    assert rewrite_links(link, path, REPOSITORY) == (published or link)


def test_the_files_that_the_site_adds_are_there() -> None:
    assert all((ROOT / path).is_file() for path in ADDED)
