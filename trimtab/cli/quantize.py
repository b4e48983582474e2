# SPDX-License-Identifier: Apache-2.0
"""`trimtab quantize`: a pretrained model in 2 to 4 bits, retrained block by block."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.train import SetOption

if TYPE_CHECKING:
    from trimtab.retrain.walk import Progress


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, or smollm2.")],
    bits: Annotated[int, typer.Option(help="Bits of a weight's code: 2 to 8.")] = 2,
    group: Annotated[int, typer.Option(help="Weights that share a scale: 64 or 128.")] = 64,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="A grid around 0, without zero points.")] = False,
    rank: Annotated[int, typer.Option(help="Of the LoRA factors; 0 trains the clipping alone.")] = 64,
    saliency: Annotated[
        bool, typer.Option("--saliency", help="Add the term for salient weights: a backward per sequence first.")
    ] = False,
    lam: Annotated[float | None, typer.Option(help="Weight of that term, the same for every model.")] = None,
    data: Annotated[
        str, typer.Option(metavar="PATH", help="Text to calibrate with, its held-out part to measure on.")
    ] = "stdlib",
    eval_: Annotated[str | None, typer.Option("--eval", metavar="PATH", help="Another text to measure on.")] = None,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    epochs: Annotated[int, typer.Option(help="Passes over them per block; 0 rounds to nearest.")] = 5,
    eval_tokens: Annotated[int, typer.Option(min=0, help="Tokens to take perplexity on; 0: none.")] = 8192,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes a GPU if there is one.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="fp32 or bf16.  [default: fp32, on a GPU as stored]")] = None,
    export: Annotated[
        list[str] | None, typer.Option(metavar="WHAT", help="packed, dequantized, peft; repeatable.")
    ] = None,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(help="Where the result goes.")] = Path("runs/quantize"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last finished block in --out.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what is in --out.")] = False,
) -> None:
    """Quantize a pretrained model to few bits and retrain what keeps it: clipping ranges and LoRA factors.

    One decoder block after the other learns to do in few bits what it did before (ApiQ, arXiv 2402.05147), with
    --saliency most carefully where the loss depends on a weight (arXiv 2504.13932). The defaults take some
    22 minutes for 135M parameters on two CPU cores; the papers' recipe is --sequences 128 --length 2048 --epochs 20.
    Further settings: --set batch=4, lr_clip=..., lr_lora=..., schedule=constant, alpha=..., after_lora=true,
    aug_loss=false.
    """
    from trimtab.cli.console import console
    from trimtab.errors import TrimtabError
    from trimtab.lab.config import load_settings
    from trimtab.retrain.settings import Settings

    own = {"bits": bits, "group": group, "symmetric": symmetric, "rank": rank, "epochs": epochs, "seed": seed}
    own |= {} if lam is None else {"lam": lam}
    if lam is not None and not saliency:
        raise TrimtabError(f"--lam weighs the term of --saliency, got {lam} without it: give both or neither")
    settings = Settings.from_dict(own | load_settings(None, set_ or ()))
    if saliency and not (settings.lam and settings.epochs):
        raise TrimtabError(
            "--saliency adds a term to training, and with lam or epochs of 0 there is none: leave it out"
        )

    from trimtab.lab.quantize import prepare, quantize, read_text

    exports = export or ["packed"]
    prepare(out, settings, exports, resume=resume, force=force)

    from trimtab.lab.pretrained import load

    place = _device(device)
    pretrained = load(model, dtype=dtype or ("fp32" if place == "cpu" else None))
    text = read_text(
        pretrained.tokenizer,
        data,
        sequences=sequences,
        length=length,
        seed=seed,
        evaluate=eval_,
        eval_tokens=eval_tokens,
    )
    out.mkdir(parents=True, exist_ok=True)
    with _Bar() as bar:
        result = quantize(
            pretrained,
            text,
            settings,
            out,
            salient=saliency,
            device=place,
            exports=exports,
            watch=bar.watch,
            told=bar.line,
        )
    console.print(str(result.retrained), markup=False)
    if result.perplexity_after is not None:
        console.print(
            f"perplexity {result.perplexity_before:.3f} -> {result.perplexity_after:.3f} "
            f"({result.eval_tokens:,} tokens)",
            markup=False,
        )
    for folder in result.folders:
        console.print(str(folder), markup=False)


def _device(name: str) -> str:
    import torch

    from trimtab.errors import TrimtabError

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise TrimtabError(f"--device must be one that torch can use here, got {name!r}: {reason}") from None
    return name


class _Bar:
    """On a terminal a bar over blocks and epochs; elsewhere a line per block."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._began: float | None = None
        self._trained = 0

    def __enter__(self) -> "_Bar":
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from trimtab.cli.console import console

        if console.is_terminal:
            columns = (TextColumn("[bold]blocks"), BarColumn(bar_width=24), MofNCompleteColumn())
            self._bar = Progress(
                *columns, TextColumn("{task.fields[note]}"), TimeRemainingColumn(), console=console, transient=True
            )
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def watch(self, at: "Progress") -> None:
        """Move the bar, or print a line when a block is done."""
        if self._began is None:
            self._began = time.monotonic()
        if self._bar is not None and self._task is None:
            self._task = self._bar.add_task("blocks", total=at.num_blocks, note="")
        if at.after is None:
            if self._bar is not None:
                self._bar.update(self._task, note=f"epoch {at.epoch}")
            return
        self._trained += not at.resumed
        done = at.block + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note="")
        pace = (time.monotonic() - self._began) / max(self._trained, 1)
        minutes = round(pace * (at.num_blocks - done) / 60)
        left = f"  about {minutes} min left" if self._trained > 1 and minutes else ""
        how = "found" if at.resumed else "done"
        self.line(f"block {done}/{at.num_blocks}  {how}, output error {at.before:.4f} -> {at.after:.4f}{left}")

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        from trimtab.cli.console import console

        console.print(text, markup=False)
