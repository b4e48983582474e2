# SPDX-License-Identifier: Apache-2.0
"""Museum: the table and the page of `trimtab bench museum`, from its plain rows.

One table per case, one row per arm: how many seeds died, the held-out loss over that of high with its 95 % interval,
whether the arm saved the run, who was blamed and how soon, and what it cost.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.report.bench import show
from trimtab.report.parts import text

WHAT = "Small reproductions of failures that others have reported: does low die, and who saves it?"
LIMITS = (
    "What this page cannot tell: each case carries a thread's mechanism in a micro model, not the run it was reported "
    "from. Intervals are Student's t over the seeds, paired with high."
)
HEADS = (
    "arm",
    "died",
    "survived",
    "held-out",
    "over high",
    "saved",
    "blamed",
    "delay",
    "skipped",
    "promoted",
    "ms/step",
)


def cases(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each case, in their order."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return found


def entries(row: Mapping[str, Any], *, between: str = "+-") -> list[str]:
    """One row as text, in the order of `HEADS`."""
    over = _shown(row["lost"], "loss")
    if _known(row["lost"]) and _known(row["interval"]):
        over += f" {between} {show('loss', row['interval'])}"
    return [
        row["arm"],
        f"{row['died']} of {row['seeds']}",
        _shown(row["survived"], "number"),
        _shown(row["loss"], "loss"),
        over,
        "" if row["arm"] in ("high", "low") else "yes" if row["saved"] else "no",
        row["blamed"] or "-",
        _shown(row["delay"], "number"),
        _shown(row["skipped"], "number"),
        _shown(row["promotion"], "share"),
        _shown(row["ms"], "ms"),
    ]


def write_museum_page(rows: Sequence[Mapping[str, Any]], path: str | Path, *, command: Sequence[str] = ()) -> Path:
    """Write the page and return its path."""
    sections = []
    for case, mine in cases(rows).items():
        head = "".join(f"<th{'' if i == 0 else ' class=n'}>{name}</th>" for i, name in enumerate(HEADS))
        body = ""
        for row in mine:
            first, *rest = entries(row, between="\u00b1")
            body += f'<tr><td class="unit">{text(first)}</td>'
            body += "".join(f'<td class="n">{text(entry)}</td>' for entry in rest) + "</tr>"
        notes = [mine[0]["what"], mine[0]["thread"], *(f"{row['arm']}: {row['note']}" for row in mine if row["note"])]
        says = "".join(f'<p class="note">{text(note)}</p>' for note in notes if note)
        inner = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        sections.append(f"<section><h2>{text(case)}</h2>{says}{inner}</section>")
    html = dict.fromkeys(("figures", "plots", "numbers", "facts", "scripts"), "") | {
        "title": "museum - trimtab bench",
        "kind": "trimtab bench",
        "heading": "museum",
        "verdict": text(WHAT),
        "notes": f'<p class="note">{text(" ".join(command))}</p>',
        "offenders": "\n".join(sections),
        "limits": text(LIMITS),
    }
    template = (resources.files("trimtab.report") / "template.html").read_text(encoding="utf-8")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], template), encoding="utf-8")
    return path


def to_json(rows: Sequence[Mapping[str, Any]], command: Sequence[str]) -> str:
    """The rows as JSON, null for what is not a number."""
    plain = [{key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in r.items()} for r in rows]
    return json.dumps({"command": list(command), "rows": plain}, indent=1, allow_nan=False)


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _shown(value: float | None, kind: str) -> str:
    return show(kind, value) if value is not None and math.isfinite(value) else "-"
