"""The documents make a site: all of them are in its navigation, and what mkdocs reads otherwise than GitHub is mended.
`make docs` builds it and follows every link."""

from __future__ import annotations

from pathlib import Path

import pytest
from publish.site import ROOT, Dead, dead_links, documents, for_the_site, linked, navigation


def test_every_document_is_in_the_navigation_once() -> None:
    listed = list(documents(navigation()))
    written = {
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "docs/**/*.md", "helm/kvstow/*.md", "bench/README.md", "examples/*.md")
        for path in ROOT.glob(pattern)
    }
    assert sorted(listed) == sorted(written)


def test_every_link_of_a_document_leads_into_the_tree() -> None:
    """So that a copy of the tree, which is what the site is made of, has what it links to."""
    found = [(name, link) for name in documents(navigation()) for link in linked((ROOT / name).read_text())]
    assert len(found) > 50
    assert [(name, link) for name, link in found if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_a_list_after_a_paragraph_is_a_list() -> None:
    assert for_the_site("It does:\n- one\n- two,\nmore\n- three\n", ROOT) == (
        "It does:\n\n- one\n- two,\nmore\n- three\n"
    )


@pytest.mark.parametrize("text", ["```\nIt does:\n- one\n```\n", "| a |\n|---|\n| 1 |\n", "- one\n  two\n- three\n"])
def test_code_tables_and_lists_stay_as_they_are(text: str) -> None:
    assert for_the_site(text, ROOT) == text


def test_a_link_to_a_folder_becomes_its_name() -> None:
    text = "[results](bench/results), [licence](LICENSE), [else](https://example.org/a)\n"
    assert for_the_site(text, ROOT) == "results, [licence](LICENSE), [else](https://example.org/a)\n"


def test_links_and_anchors_of_the_site_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="here">A</h1> <a href="../#there">x</a> <a href="#here">y</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">1</a> <a href="a/#gone">2</a> <img src="no.png"> <a href="https://example.org/no">3</a>'
        '<source srcset="dark.png">'
    )
    assert dead_links(tmp_path) == [
        Dead("a/index.html", "../#there"),
        Dead("index.html", "a/#gone"),
        Dead("index.html", "dark.png"),
        Dead("index.html", "no.png"),
    ]
