# SPDX-License-Identifier: Apache-2.0
"""`trimtab train`: train a small LLaMA-style model in low precision under control."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[Path | None, typer.Option("--config", help="Settings from a .toml or .yaml file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as lr=2e-3 or policy.alpha=2; repeatable."),
]


LogOption = Annotated[
    list[str] | None,
    typer.Option("--log", metavar="KIND", help="Also write to tensorboard, wandb or trackio; repeatable."),
]
AlertOption = Annotated[
    list[str] | None,
    typer.Option("--alert", metavar="WHOM", help="Tell an http(s) address, wandb or a program of trouble; repeatable."),
]


def run(
    config: ConfigOption = None,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or start it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    log: LogOption = None,
    alert: AlertOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every switch.")] = False,
) -> None:
    """Train a small LLaMA-style model in low precision under control, into a run folder.

    Every setting has a default: `trimtab train` alone trains on the text of Python's standard library.
    `trimtab env --set ...` prints them all. On several GPUs or processes:
    `torchrun --nproc-per-node 2 -m trimtab train --set parallel=ddp` (or `fsdp2`).
    """
    from trimtab.cli.console import Display, show_result
    from trimtab.cli.ranks import is_quiet
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import Config, load_settings

    settings = load_settings(config, set_ or ())
    if seed is not None:
        settings["seed"] = seed
    if resume and force:
        raise TrimtabError("--resume continues a run and --force replaces it: give one of them")
    if not resume:  # a resumed run's are checked together with its stored ones
        Config.from_dict(settings)  # refuse bad settings before torch is loaded

    from trimtab.lab.dashboard import dashboard
    from trimtab.lab.train import train

    if is_quiet():
        train(settings, out, resume=resume, force=force)
        return
    with Display(switches=verbose) as display, closing(dashboard(display, log or (), alert or (), out)) as board:
        result = train(settings, out, resume=resume, force=force, watcher=board, sinks=board.sinks)
    show_result(result, out)
