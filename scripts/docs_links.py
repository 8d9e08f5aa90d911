"""Links from pages to files of the repository, where the pages are a site.

They lead to the repository at $DOCS_REPOSITORY, as https://host/owner/name/blob/main; without it, they are plain text.
"""

import os
import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with such links. Called by mkdocs."""
    repository = os.environ.get("DOCS_REPOSITORY", "").rstrip("/")
    return _OUTSIDE.sub(lambda found: _link(found[1], found[2], repository), markdown)


def _link(text: str, path: str, repository: str) -> str:
    if repository:
        return f"[{text}]({repository}/{path})"
    name = path.partition("#")[0]
    return f"`{name}`" if text.strip("`") in name else f"{text} (`{name}`)"
