# SPDX-License-Identifier: Apache-2.0
"""The command line: one small file per verb, and one door that turns errors into one clear line.

    trimtab train     train a small model under control, into a run folder
    trimtab demo      see control at work, in a few minutes
    trimtab report    one HTML page about a run
    trimtab replay    what another policy would have decided on a run's norms
    trimtab evaluate  the held-out loss of a run's model, and what is left of it in few bits
    trimtab bench     arms against each other over seeds: a suite, a table, a page
    trimtab diagnose  which units low precision hurts, without training
    trimtab env       versions, machine, resolved settings

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 130 interrupted. Nothing heavy is imported before a
verb runs, so `--help` is quick and loads no torch.
"""

import logging
import os
import sys


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow a step twentyfold on a busy machine
    try:
        import typer
    except ImportError:
        sys.exit("error: the command line needs typer and rich: pip install 'trimtab[cli]'")
    from trimtab.errors import MissingExtraError, NonFiniteError, TrimtabError

    logging.getLogger("trimtab").addHandler(_OneLine())
    logging.getLogger("trimtab.control.controller").setLevel(logging.ERROR)  # its events are shown by the display
    try:
        code = _app(typer)(standalone_mode=False)
        if code == 130:
            raise KeyboardInterrupt  # the parser has made a code of it
        sys.exit(code)
    except NonFiniteError as error:
        _fail(str(error), 1)
    except (TrimtabError, MissingExtraError) as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted; the run folder is whole up to its last checkpoint, --resume continues it", 130)
    except typer.Exit as exit_:
        sys.exit(exit_.exit_code)
    except Exception as error:
        if not hasattr(error, "exit_code") or not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # type: ignore[attr-defined]  (a usage error of the command-line parser)
        if message:
            _fail(message, 2)
        sys.exit(2)  # no verb: the parser has shown the help


def _app(typer):
    from trimtab.cli import bench, demo, diagnose, env, evaluate, replay, report, train

    app = typer.Typer(
        name="trimtab",
        help="Watch each operator's gradient norm and run the risky few in high precision, within a budget.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for verb in (train, demo, report, replay, evaluate, bench, diagnose, env):
        app.command(name=verb.__name__.rsplit(".", 1)[1])(verb.run)
    return app


class _OneLine(logging.Handler):
    """Shows what the library logs as plain lines."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr)


def _fail(message: str, code: int) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
