"""Makes the site of the Markdown as it stands: links out of docs/ keep their meaning.

A page of the root that the navigation names becomes a page of the site, and of a link to anything
else in the checkout its path remains.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that leave docs/ into what the site has of them."""
    source = ROOT / page.file.src_uri if page.file.src_uri in PAGES else None
    folder = ROOT if source else (ROOT / "docs" / page.file.src_uri).parent
    depth = page.file.src_uri.count("/")

    def replaced(match: re.Match[str]) -> str:
        picture, text, link = match.groups()
        place, hash_, anchor = link.partition("#")
        target = (folder / place).resolve()
        if not place or "://" in link or not target.is_relative_to(ROOT):
            return match[0]
        path = target.relative_to(ROOT)
        if path.as_posix() in PAGES:
            inside = path.as_posix()
        elif path.parts[:1] == ("docs",) and target.is_file():
            inside = path.relative_to("docs").as_posix()
        elif path.as_posix() == "README.md":
            inside = "index.md"
        else:
            return text if path.as_posix() in text else f"{text} (`{path}`)"
        return f"{picture}[{text}]({'../' * depth}{inside}{hash_}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.S | re.M)  # every second is code
    return "".join(part if n % 2 else LINK.sub(replaced, part) for n, part in enumerate(parts))
