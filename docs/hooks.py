"""For MkDocs: pages and files that lie outside docs/, so that one link works on GitHub and in the site.

README.md is the home page; CONTRIBUTING.md and CHANGELOG.md are pages. Any other file of the repository that a page
links to, a record for instance, is copied into the site. The table of public names is made of their docstrings.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""In the repository → in the site."""
_NAMES = "<!-- public names -->"
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    uri = page.file.src_uri
    source = next((name for name, in_site in PAGES.items() if in_site == uri), f"docs/{uri}")

    def in_site(link: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(source).parent / link[1])
        if not (ROOT / target).is_file():
            return link[1]  # MkDocs says that it leads nowhere
        found = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(found) is None:
            files.append(File.generated(config, found, abs_src_path=str(ROOT / target)))
        return os.path.relpath(found, PurePosixPath(uri).parent)

    markdown = _LINK.sub(in_site, markdown)
    return markdown.replace(_NAMES, _public_names()) if _NAMES in markdown else markdown


def _public_names() -> str:
    """A row for each: a link to where it is described, and the first line of its docstring."""
    package = griffe.load("assay", search_paths=[ROOT / "src"], resolve_aliases=True)
    lines = ["| name | |", "|---|---|"]
    for name in package.exports or ():
        docstring = package[str(name)].docstring
        first = docstring.value.partition("\n")[0].replace("|", "\\|") if docstring else ""
        lines.append(f"| [`assay.{name}`][assay.{name}] | {first} |")
    return "\n".join(lines)
