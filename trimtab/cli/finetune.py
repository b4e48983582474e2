# SPDX-License-Identifier: Apache-2.0
"""`trimtab finetune`: fine-tune a pretrained model in INT8 under control."""

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.train import AlertOption, ConfigOption, LogOption, SetOption


def run(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face folder, a GGUF file, or smollm2.", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Argument(help="A .jsonl file of questions and answers, or a folder.", show_default=False)
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train every weight instead of LoRA adapters.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(help="The run folder.")] = Path("runs/finetune"),
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or start it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in --out.")] = False,
    seed: Annotated[int | None, typer.Option(help="Same as --set seed=N.")] = None,
    log: LogOption = None,
    alert: AlertOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every switch.")] = False,
) -> None:
    """Fine-tune a pretrained model with INT8 base linears under control, into a run folder.

    LoRA adapters learn (or, with --full, everything); each decoder layer is a unit and runs INT8 or plain. Lines of
    data are {"messages": [...]}, or pairs such as {"question": ..., "answer": ...}; only answers have a loss. Fixed
    arms: `--set mode=off --set path=low` (INT8) or `path=high`; `--set random_like=RUN` takes random layers, as many
    as that run had. On a GPU `--set dtype=bf16`. Nothing is downloaded.
    """
    from trimtab.cli.console import Display, console, show_result
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import load_settings
    from trimtab.lab.finetune_config import FinetuneConfig

    settings = load_settings(config, set_ or ())
    given = {"model": model, "data": data, "seed": seed, "full": full or None}
    settings |= {key: value for key, value in given.items() if value is not None}
    if resume and force:
        raise TrimtabError("--resume continues a run and --force replaces it: give one of them")
    if not resume:  # a resumed run's are checked together with its stored ones
        FinetuneConfig.from_dict(settings)  # refuse bad settings before torch is loaded

    from trimtab.lab.dashboard import dashboard
    from trimtab.lab.finetune import finetune

    with (
        Display("finetune", switches=verbose) as display,
        closing(dashboard(display, log or (), alert or (), out)) as board,
    ):
        result = finetune(settings, out, resume=resume, force=force, watcher=board, sinks=board.sinks)
    show_result(result, out)
    made = out / ("model" if (out / "model").is_dir() else "adapter")
    console.print(
        f"{made} holds what was learned, as Transformers{'' if made.name == 'model' else ' and peft'} read it"
    )
