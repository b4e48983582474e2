# SPDX-License-Identifier: Apache-2.0
"""The command line: one small file per verb, and one door that turns errors into one clear line.

    trimtab train     train a small model under control, into a run folder
    trimtab finetune  fine-tune a pretrained model in INT8 under control
    trimtab demo      see control at work, in a few minutes
    trimtab watch     a page on this machine that shows runs while they go on
    trimtab report    one HTML page about a run, or about several side by side
    trimtab replay    what another policy would have decided on a run's norms
    trimtab sweep     what a grid of policies would have decided, and which to try
    trimtab postmortem  where a run's loss left its range, and what its norms did before
    trimtab export    what a run says to keep high, for torchao, Transformer Engine or Megatron
    trimtab evaluate  the held-out loss of a run's model, and what is left of it in few bits
    trimtab bench     arms against each other over seeds: a suite, a table, a page
    trimtab diagnose  which units low precision hurts, without training
    trimtab quantize  a pretrained model in 2 to 4 bits, retrained block by block
    trimtab doctor    known traps of a model, a recipe and this machine, with remedies
    trimtab env       versions, machine, resolved settings

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted. Nothing heavy is imported before a
verb runs, so `--help` is quick and loads no torch.

Of several ranks (torchrun) the first one speaks, and an error is shown by the rank that failed first, with its number.
"""

import logging
import os
import sys
import traceback
import warnings

from trimtab.cli.ranks import is_one_of_many, is_quiet

LONGEST_LINE = 2000


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow a step twentyfold on a busy machine
    try:
        import typer
    except ImportError:
        sys.exit("error: the command line needs typer and rich: pip install 'trimtab[cli]'")
    from trimtab.errors import MissingExtraError, NonFiniteError, RankError, TrimtabError

    if is_quiet():
        warnings.simplefilter("ignore")
    logging.getLogger("trimtab").addHandler(logging.NullHandler() if is_quiet() else _OneLine())
    logging.getLogger("trimtab.control.controller").setLevel(logging.ERROR)  # its events are shown by the display
    try:
        code = _app(typer)(standalone_mode=False)
        if code == 130:
            raise KeyboardInterrupt  # the parser has made a code of it
        sys.stdout.flush()  # here, where a full disk is one line
        sys.exit(code)
    except NonFiniteError as error:
        _fail(str(error), 1, error)
    except (TrimtabError, MissingExtraError) as error:
        _fail(str(error), 2, error)
    except RankError:
        _leave(1)
    except OSError as error:
        _fail(_refusal(error), 1, error)
    except (KeyboardInterrupt, typer.Abort) as error:
        _fail("interrupted; the run folder is whole up to its last checkpoint, --resume continues it", 130, error)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            if not is_one_of_many():
                raise
            if _is_shown(error):
                traceback.print_exception(error)
            _leave(1)
        message = error.format_message()  # type: ignore[attr-defined]  (a usage error of the command-line parser)
        if message:
            _fail(message, 2, error)
        sys.exit(2)  # no verb: the parser has shown the help


def _app(typer):
    from trimtab.cli import (
        bench,
        demo,
        diagnose,
        doctor,
        env,
        evaluate,
        export,
        finetune,
        postmortem,
        quantize,
        replay,
        report,
        sweep,
        train,
        watch,
    )

    app = typer.Typer(
        name="trimtab",
        help="Watch each operator's gradient norm and run the risky few in high precision, within a budget.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    verbs = (
        train,
        finetune,
        demo,
        watch,
        report,
        replay,
        sweep,
        postmortem,
        export,
        evaluate,
        bench,
        diagnose,
        quantize,
        doctor,
        env,
    )
    for verb in verbs:
        app.command(name=verb.__name__.rsplit(".", 1)[1])(verb.run)
    return app


class _OneLine(logging.Handler):
    """Shows what the library logs as plain lines."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {_one_line(record.getMessage())}", file=sys.stderr)


def _refusal(error: OSError) -> str:
    """What the operating system refused, of which file, and what to do."""
    from trimtab.files import REMEDIES

    file = error.filename
    try:
        sys.stdout.flush()
    except OSError:  # it was the output itself: the rest of it goes nowhere, or leaving would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        file = file or "standard output"
    parts = (error.strerror or str(error), file, REMEDIES.get(error.errno or 0))
    return ": ".join(str(part) for part in parts if part)


def _fail(message: str, code: int, error: BaseException) -> None:
    if _is_shown(error):
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        print(f"error: {_one_line(where + message)}", file=sys.stderr)
    _leave(code)


def _one_line(text: str) -> str:
    """A message as a terminal may show it: names and values in it may come from somebody else's file."""
    from trimtab.report.names import visible
    from trimtab.report.verdict import brief

    return visible(brief(text, LONGEST_LINE))


def _leave(code: int) -> None:
    """Exit; one of several ranks at once, because its process group may be waiting for ranks that wait for it."""
    if is_one_of_many():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _is_shown(error: BaseException) -> bool:
    """Whether it is this process that shows it: of several ranks, the first that failed."""
    if not is_one_of_many():
        return True
    from trimtab.lab.meeting import shows

    return shows(error)
