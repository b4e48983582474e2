# SPDX-License-Identifier: Apache-2.0
"""What trimtab raises and warns with.

Every message says three things: the rule, the value that broke it, and the remedy. `TrimtabError` is
the one base class to catch; it is a `ValueError`, because what is wrong is nearly always an input.
"""


class TrimtabError(ValueError):
    """An input that trimtab cannot work with: the message gives the rule, the value and the remedy."""


class NonFiniteError(TrimtabError):
    """The gradient was not finite for too many optimizer steps in a row."""


class RankError(RuntimeError):
    """Another rank of the run failed first, and shows its error: this one only stops."""


class MissingExtraError(ImportError):
    """An optional package is not installed: the message ends in the pip line that installs it."""


class NoEffectWarning(UserWarning):
    """A call found nothing to change (composer's idea): a run that quietly stays as it was wastes a week."""


def one_line(error: BaseException, most: int = 200) -> str:
    """The kind of another package's error and what it says, to be part of a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Build the error for an absent optional package."""
    return MissingExtraError(f"{purpose} needs {package}, which is not installed: pip install 'trimtab[{extra}]'")
