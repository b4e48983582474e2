# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: links that leave docs/ (to sources, the log, configurations) keep their text and lose their link.

The same pages are read on a code host, where such links work, and as a site, where they would lead nowhere.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page before it is rendered."""
    return OUTSIDE.sub(r"\1", markdown)
