# SPDX-License-Identifier: Apache-2.0
"""What every page carries inside itself, so that it opens offline: its data, plotly, and its own script."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.errors import missing_extra
from trimtab.files import write_whole


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return (resources.files("trimtab.report") / name).read_text(encoding="utf-8")


def scripts(data: Mapping[str, Any], code: str) -> str:
    """The script elements of a page: its data as JSON, plotly, and the file `code`."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise missing_extra("plotly", "report", "Writing a report") from None
    # Inside a script element only "<" is dangerous ("</script", "<!--"); in JSON it only occurs in strings.
    inner = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        f'<script type="application/json" id="data">{inner}</script>\n'
        f"<script>{get_plotlyjs()}</script>\n<script>{asset(code)}</script>"
    )


def write(page: str, path: str | Path) -> Path:
    """Write a page, its folder too if need be, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)
    return path
