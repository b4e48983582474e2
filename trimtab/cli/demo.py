# SPDX-License-Identifier: Apache-2.0
"""`trimtab demo`: see control at work on injected faults, in a few minutes on two CPU cores."""

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.train import SetOption

FAULTS = "; ".join(
    f"{unit}:grad_scale:start={start},width=20,size=16"
    for unit, start in (
        ("blocks.1.mlp.up", 110),
        ("blocks.0.attn.v", 180),
        ("blocks.1.mlp.gate", 250),
        ("blocks.0.mlp.up", 320),
    )
)
POLICY = {"preset": "steady", "max_high": 2, "replay_step": 3.0, "warmup": "monitor", "warmup_steps": 80}
SETTINGS = {"steps": 400, "recipe": "fp8", "faults": FAULTS, "policy": POLICY}


def run(
    out: Annotated[Path, typer.Option(help="Where the four run folders go.")] = Path("runs/demo"),
    set_: SetOption = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier demo in --out.")] = False,
) -> None:
    """Train the same small model four times under the same injected faults: high, low, control, random."""
    from trimtab.cli.console import Display, console
    from trimtab.lab.config import Config, load_settings

    given = load_settings(None, set_ or ())
    settings = {**SETTINGS, **given, "policy": POLICY | given.get("policy", {}), "seed": seed}
    Config.from_dict(settings)

    from trimtab.lab.demo import run_demo
    from trimtab.report.page import write_page

    console.print("A small LLaMA-style model, FP8 linears, the text of Python's standard library as data.")
    console.print(
        "Four runs from one seed. On four occasions the low path of one linear goes wrong for 20 steps "
        "(its gradient is 16 times too large); the high path is immune.\n"
    )

    def watch(arm: str) -> Display:
        return Display(f"{arm:<8}", switches=arm == "control", notes=arm == "control")

    outcome = run_demo(settings, out, watch, force=force)
    console.print()
    for arm, result in outcome.results.items():
        console.print(f"{arm:<8}  held-out loss {result.eval_loss_high:.4f}")
    console.print(f"\n[bold]{outcome.sentence()}[/bold]\n")
    console.print(f"report: {write_page(out / 'control')}")
    console.print(f"next:   trimtab replay {out / 'control'} --set alpha=1.1")
    console.print("        trimtab train --set recipe=fp4 --set unit=block")
