# SPDX-License-Identifier: Apache-2.0
"""Markdown: a run in twenty lines and a picture, for an issue or a chat.

    write_markdown("runs/a")                 runs/a/report.md and runs/a/report.svg

Names are somebody else's text: in code spans, whose fence is longer than any in the name, nothing in them is markup, no
mention and no link; other text is escaped character by character.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from trimtab.report.assets import write
from trimtab.report.names import visible
from trimtab.report.page import survey
from trimtab.report.picture import picture
from trimtab.report.read import Run, read_run
from trimtab.report.summary import Summary
from trimtab.report.verdict import brief, percent

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!@$&])")
OFFENDERS = 3


def write_markdown(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the summary, and its picture beside it; returns the path of the former."""
    run = read_run(folder, with_trace=False)
    path = run.folder / "report.md" if out is None else Path(out)
    scan, pool, summary = survey(run)
    names = () if scan is None else scan.header.units
    image = write(picture([run], pool, names), path.with_suffix(".svg"))
    return write(run_markdown(run, summary, image.name), path)


def run_markdown(run: Run, s: Summary, image: str) -> str:
    """One run in at most twenty lines."""
    losses, m = s.losses, s.metrics
    rows: list[tuple[str, str]] = []
    if losses.last is not None:
        bad = f", {losses.nonfinite:,} not finite" if losses.nonfinite else ""
        rows.append(("loss, first and last", f"{losses.first:.4g}, {losses.last:.4g}{bad}"))
    elif losses.nonfinite:
        rows.append(("loss", f"{losses.nonfinite:,} values, none finite"))
    best = [f"{code(key, table=True)} {value:.4g}" for key, value in list(losses.best_evals.items())[:3]]
    rows += [("best evaluation", ", ".join(best))] if best else []
    if m:
        would = "" if s.acted else " (would have been)"
        rows += [
            ("false alarms per 1,000 quiet steps", f"{m['false_alarms_per_1k']:.3g}"),
            (f"unit-steps high{would}", percent(m["promotion_ratio"])),
            (f"budget full{would}", f"{percent(m['hit_maxO'])} of steps, {m['denied']:,.0f} denied"),
            ("steps with a norm that was not finite", f"{m['nonfinite']:,.0f}"),
            ("median ratio", f"{m['median_ratio']:.2f}"),
        ]
        most = [f"{code(o.unit, table=True)} ({o.steps_high:,} steps)" for o in s.offenders[:OFFENDERS]]
        more = f" and {len(s.offenders) - OFFENDERS} more" if len(s.offenders) > OFFENDERS else ""
        rows += [("offenders", ", ".join(most) + more)] if most else []
    size = f"{s.num_passes:,} passes over {s.num_units:,} units, at most {s.max_high} high at once. " if m else ""
    versions = run.info.get("versions")
    known = versions if isinstance(versions, dict) else {}
    made = ", ".join(f"{name} {known[name]}" for name in ("trimtab", "torch", "python") if known.get(name))
    lines = [f"### {code(run.name)}", "", escaped(s.verdict), "", f"![loss and ratios]({quote(image)})", ""]
    lines += ["| | |", "|---|--:|", *(f"| {name} | {value} |" for name, value in rows), ""] if rows else []
    return "\n".join([*lines, size + (escaped(made) + "." if made else "")]).rstrip() + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; cells are Markdown already."""
    rule = "|".join(["---", *["--:"] * (len(heads) - 1)])
    return [f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)]


def code(name: str, *, table: bool = False) -> str:
    """A name as a code span; in a table a bar is escaped, because there it would end the cell."""
    shown = brief(visible(name), 80)
    fence = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) or not shown else ""
    return f"{fence}{space}{shown.replace('|', chr(92) + '|') if table else shown}{space}{fence}"


def escaped(text: str) -> str:
    """Text in which nothing is markup."""
    return SPECIAL.sub(r"\\\1", visible(text))
