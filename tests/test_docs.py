"""The site is built without a warning, has every public name, and works where there is no network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import assay

pytest.importorskip("mkdocs", reason="the docs need pip install 'assay[docs]'")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in site.glob("api/*.html"))
    missing = [name for name in assay.__all__ if f'id="assay.{name}"' not in pages]
    assert not missing, f"describe them in docs/api: {missing}"


@pytest.mark.slow
def test_links_lead_somewhere_and_nothing_is_fetched(site: Path) -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html") if page.name != "404.html"}
    assert site / "index.html" in pages
    for page, text in pages.items():
        for tag, target in re.findall(r'<(\w+)[^>]* (?:href|src)="([^"]*)"', text):
            if re.match(r"https?:", target):
                assert tag == "a", f"{page.name} fetches {target}"
                continue
            path, _, anchor = unquote(target).partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), f"{page.name} links to {target}"
            if anchor and found in pages:
                assert f'id="{anchor}"' in pages[found], f"{page.name} links to {target}"
