# SPDX-License-Identifier: Apache-2.0
"""The page of a diagnosis: one HTML file without any library, from a plain dict.

    write_diagnosis(found, "diagnosis.html")      found = Diagnosis.to_dict(), with "model", "data", ... if known

From top to bottom: what stands out in one sentence, four figures, every unit's recovery gap as a bar with its interval,
the findings on both sides and by role, the list to keep high, the numbers of the reference, and what a diagnosis cannot
tell. Names come from somebody's model, so every string is escaped; the template's content policy forbids the network.
"""

import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from trimtab.report.assets import write
from trimtab.report.parts import card, text

MAX_ROWS = 60
LIMITS = (
    "What this page cannot tell: it holds for these weights and these batches; a unit that is harmless now may not be "
    "so later. It measures the error of one step's gradient, and a small error in a bad direction may harm more than a "
    "large one that the optimizer averages out. Gaps do not add up: what several units recover together is measured "
    "only for the list above."
)
STYLE = """<style>
.gap { position: relative; height: 14px; min-width: 220px; margin-top: 4px; }
.gap i, .gap u { position: absolute; display: block; }
.gap i { top: 2px; height: 10px; left: var(--a); width: var(--w); background: var(--cool); border-radius: 2px; }
.gap i.top { background: var(--warm); }
.gap u { top: 6px; height: 2px; left: var(--a); width: var(--w); background: var(--ink); opacity: .55; }
.gap u.zero { top: -3px; height: 20px; width: 1px; background: var(--soft); }
td.worst { font-weight: 650; }
</style>"""
COPY = """<script>
document.getElementById("copy")?.addEventListener("click", async (event) => {
  const list = document.getElementById("keep-list");
  try { await navigator.clipboard.writeText(list.textContent); event.target.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(list); event.target.textContent = "Selected"; }
});
</script>"""


def write_diagnosis(found: Mapping[str, Any], path: str | Path) -> Path:
    """Write the page and return its path."""
    return write(render_diagnosis(found), path)


def render_diagnosis(found: Mapping[str, Any]) -> str:
    """The page as HTML."""
    name = str(found.get("model", "model"))
    shown = len(found["units"]) - MAX_ROWS
    more = f'<p class="note">The {MAX_ROWS} largest of {len(found["units"]):,} units.</p>' if shown > 0 else ""
    html = {
        "title": text(f"{name} - trimtab diagnosis"),
        "kind": "trimtab diagnosis",
        "heading": text(name),
        "verdict": text(verdict(found)),
        "notes": f'<p class="note">{text(_note(found))}</p>',
        "figures": "\n".join(card(*figure) for figure in _figures(found)),
        "plots": f"{STYLE}{_gaps(found)}{more}",
        "offenders": _sides(found) + _keep(found["keep_high"]),
        "numbers": _numbers(found),
        "facts": "",
        "limits": text(LIMITS),
        "scripts": COPY,
    }
    template = (resources.files("trimtab.report") / "template.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda m: html[m.group(1)], template)


def verdict(found: Mapping[str, Any]) -> str:
    """What stands out, in one or two sentences."""
    rows, keep = found["units"], found["keep_high"]
    top = rows[0]
    mean, half = top["gap"]["mean"], top["gap"]["half"]
    if mean is None:
        said = f"{top['unit']} makes the gradient infinite or not a number in low precision: keep it high."
    elif mean <= 0:
        return f"No unit is worth recovering alone: none of {len(rows)} gaps is above zero under {found['recipe']}."
    elif half is not None and mean <= half:
        said = (
            f"No single unit is certain to stand out: over {found['batches']} batches the largest gap, of "
            f"{top['unit']}, is not clear of zero."
        )
    else:
        share = "" if top["share"] is None else f": it takes away {_percent(top['share'])} of the gradient error"
        said = f"Of {len(rows)} units {top['unit']} is the one most worth running high{share}."
    if keep and len(keep["units"]) > 1 and keep["share"] is not None:
        said += f" The {len(keep['units'])} units of the keep-high list take away {_percent(keep['share'])} together."
    return said


def _note(found: Mapping[str, Any]) -> str:
    facts = [f"recipe {found['recipe']}"]
    facts += [f"step {found['step']:,}"] if found.get("step") is not None else []
    facts += [f"{found['batches']} batches" + (f" of {found['data']}" if found.get("data") else "")]
    facts += [f"{found['passes']:,} passes"] + ([f"{found['seconds']:.0f} s"] if found.get("seconds") else [])
    return ", ".join(facts) + "; intervals are 95 % over the batches. Nothing was trained."


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    low, top, keep = found["all_low"], found["units"][0], found["keep_high"] or {"units": [], "share": None}
    return [
        (_percent(low["relative"]["mean"]), "gradient error with everything low", _plus(low["relative"], share=True)),
        (_signed(low["loss_change"]["mean"]), "change of the loss with everything low", _plus(low["loss_change"])),
        (_percent(top["share"]), "of the squared error is won back by the first unit", str(top["unit"])),
        (_percent(keep["share"]), "by the keep-high list together", f"{len(keep['units'])} units"),
    ]


def _gaps(found: Mapping[str, Any]) -> str:
    rows = found["units"][:MAX_ROWS]
    ends = [0.0]
    for row in rows:
        mean, half = row["gap"]["mean"], row["gap"]["half"] or 0.0
        ends += [] if mean is None else [mean - half, mean + half]
    least, most = min(ends), max(ends)
    body = "".join(
        f'<tr><td class="unit">{text(row["unit"])}</td><td>{_bar(row["gap"], least, most, first=index == 0)}</td>'
        f'<td class="n">{_number(row["gap"]["mean"])}</td><td class="n">{_plus(row["gap"])}</td>'
        f'<td class="n">{_percent(row["share"])}</td></tr>'
        for index, row in enumerate(rows)
    )
    says = "How much of the squared gradient error goes away when this unit alone runs high and all others low."
    return (
        f'<section id="gaps"><h2>Recovery gap</h2><p class="note">{says}</p><div class="scroll"><table><thead><tr>'
        f"{_heads('unit', '', 'gap', '95 %', 'of all')}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _bar(gap: Mapping[str, Any], least: float, most: float, *, first: bool) -> str:
    """A bar from zero to the mean, its interval, and the zero line."""
    span = (most - least) or 1.0
    mean, half = gap["mean"], gap["half"]

    def place(a: float, b: float) -> str:
        left, right = sorted((a, b))
        return f'style="--a: {100 * (left - least) / span:.2f}%; --w: {100 * (right - left) / span:.2f}%"'

    if mean is None:  # infinite: as long as there is room
        mean, half = most, None
    whisker = "" if half is None else f"<u {place(mean - half, mean + half)}></u>"
    top = ' class="top"' if first else ""
    return f'<div class="gap"><i{top} {place(0.0, mean)}></i>{whisker}<u class="zero" {place(0.0, 0.0)}></u></div>'


def _sides(found: Mapping[str, Any]) -> str:
    roles = list(found["units"][0]["roles"])
    body = ""
    for row in found["units"][:MAX_ROWS]:
        low, high = row["only_low"], row["only_high"]
        cells = [_percent(low["own"]["mean"]), _percent(low["relative"]["mean"]), _number(low["cosine"]["mean"], 6)]
        cells += [_signed(low["loss_change"]["mean"]), _percent(high["relative"]["mean"])]
        cells += [_signed(high["loss_change"]["mean"])]
        body += f'<tr><td class="unit">{text(row["unit"])}</td>' + "".join(f'<td class="n">{c}</td>' for c in cells)
        for role in roles:
            worst = " worst" if role == row["worst_role"] else ""
            body += f'<td class="n{worst}">{_percent(row["roles"][role]["relative"]["mean"])}</td>'
        body += "</tr>"
    heads = ("unit", "own error", "error, only it low", "cosine", "loss", "error, only it high", "loss")
    says = (
        "Errors are |g - g_high| / |g_high|; the own error is over the unit's parameters alone, and far above that of "
        "the other units where its low path is broken. Only it low: against everything high. Only it high: what is "
        "left, its loss against everything low."
    )
    if roles:
        says += " By role: only that product of the unit low, its worst one in bold."
    return (
        f'<section id="sides"><h2>Each unit on both sides</h2><p class="note">{says}</p><div class="scroll"><table>'
        f"<thead><tr>{_heads(*heads, *roles)}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _keep(keep: Mapping[str, Any] | None) -> str:
    if not keep or not keep["units"]:
        return ""
    says = f"Measured together they take away {_percent(keep['share'])} of the squared error"
    if keep["gap"]["mean"] is not None and keep["sum_of_gaps"]["mean"]:
        says += f": {keep['gap']['mean'] / keep['sum_of_gaps']['mean']:.2f} times the sum of their gaps"
    names = text(json.dumps(keep["patterns"], indent=2, ensure_ascii=False))
    box = f'<div class="keep"><pre id="keep-list">{names}</pre><button type="button" id="copy">Copy</button></div>'
    return f'<section id="keep"><h2>Keep high</h2><p class="note">{text(says)}.</p>{box}</section>'


def _numbers(found: Mapping[str, Any]) -> str:
    reference, low = found["reference"], found["all_low"]
    rows = [
        ("loss", reference["loss"], "with everything high"),
        ("gradient norm", reference["grad_norm"], "with everything high, over all trainable parameters"),
        ("squared error", low["error"], "with everything low: what the gaps are parts of"),
        ("cosine", low["cosine"], "of the gradients with everything low and everything high"),
    ]
    body = "".join(
        f'<tr><th>{name}</th><td class="n">{_number(value["mean"], 6)}</td><td class="n">{_plus(value)}</td>'
        f'<td class="say">{says}</td></tr>'
        for name, value, says in rows
    )
    table = f'<div class="scroll"><table class="numbers"><tbody>{body}</tbody></table></div>'
    return f'<section id="numbers"><h2>Reference</h2>{table}</section>'


def _heads(*names: str) -> str:
    return "".join(f"<th{'' if index == 0 else ' class=n'}>{text(name)}</th>" for index, name in enumerate(names))


def _number(value: float | None, digits: int = 3) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"


def _signed(value: float | None) -> str:
    return "not finite" if value is None else f"{value:+.2e}" if 0 < abs(value) < 1e-3 else f"{value:+.4f}"


def _percent(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if abs(value) >= 0.995 else f"{100 * value:.2g} %"


def _plus(value: Mapping[str, Any], *, share: bool = False) -> str:
    half = value["half"]
    if half is None:
        return ""
    return f"+- {_percent(half)}" if share else f"+- {half:.2g}"
