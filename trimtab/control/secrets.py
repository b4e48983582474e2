# SPDX-License-Identifier: Apache-2.0
"""Secrets: kept out of what a run writes about itself.

    command_line()          the words of this process's command, without the secrets among them
    without_secrets(config)     plain values, without the secrets among them

A run folder is copied, attached to issues and published, and nobody reads its run.json first. Four kinds of secrets are
known, and `***` takes their place:

    by name         --api-key X, --set token=X, {"password": X}, https://host/?access_token=X
    by shape        what the large services hand out: hf_..., sk-..., ghp_..., AKIA..., three parts of a JWT
    in addresses    user:password@ of any; all behind the host where the address itself is the key (webhooks)
    by value        whatever an environment variable holds whose own name says that it is a secret

That is a net and not a proof: a secret in the middle of a word, under a name of your own, goes through. `eos_token` and
`sort_key` are no secrets, and paths are none, so names are matched narrowly.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
SHORTEST = 8
"""Characters of an environment variable's value that is looked for: a shorter one is found everywhere."""

_OWNERS = (
    "api|auth|access|bearer|client|session|refresh|secret|private|hf|hub|huggingface|wandb|openai|github|gitlab|aws"
)
NAMES = re.compile(
    rf"(^|[_.])(password|passwd|passphrase|secret|credentials?|api_?token|api_?key|webhook(_url)?|hook_url|"
    rf"({_OWNERS})_?(token|key|secret))$|^(token|apikey|alert)$"
)
VARIABLES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIALS?|PAT|WEBHOOK(_URL)?|DSN)$")
SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|"
    r"xox[abeprs]-[\w-]{10,}|(AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
)
USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
HOOKS = re.compile(
    r"(https?://(?:hooks\.slack\.com|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]*webhook[\w.-]*))/\S*", re.I
)
QUERY = re.compile(r"([?&;])([\w.-]+)=([^&;#\s]+)")
OPTION = re.compile(r"(-{0,2}[A-Za-z][\w.-]*)=(.+)", re.S)


def command_line() -> list[str]:
    """The command of this process, word by word, without secrets."""
    return without_secrets(list(sys.argv))


def without_secrets(value: Any) -> Any:
    """The same value with `***` in place of the secrets in it; what holds none comes back equal."""
    found = [
        text
        for name, text in os.environ.items()
        if VARIABLES.search(name.upper()) and len(text) >= SHORTEST and not text.startswith(("/", "~", "."))
    ]
    return _hidden(value, sorted(found, key=len, reverse=True))


def _hidden(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return _text(value, secrets)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_named(key, item) else _hidden(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        words = [_hidden(item, secrets) for item in value]
        for before, (place, word) in zip(value, list(enumerate(value))[1:], strict=False):
            if isinstance(before, str) and before.startswith("--") and "=" not in before and _is_named(before, word):
                words[place] = HIDDEN
        return words if isinstance(value, list) else tuple(words)
    return value


def _is_named(name: Any, value: Any) -> bool:
    """Whether the name of a value says that it is a secret; switches and missing ones are none."""
    told = str(name).lstrip("-").replace("-", "_").lower()
    return bool(NAMES.search(told)) and not isinstance(value, bool) and value not in (None, "")


def _text(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    if (option := OPTION.fullmatch(text)) and _is_named(option[1], option[2]):
        return f"{option[1]}={HIDDEN}"
    text = HOOKS.sub(rf"\1/{HIDDEN}", USER.sub(HIDDEN, SHAPES.sub(HIDDEN, text)))
    return QUERY.sub(lambda m: f"{m[1]}{m[2]}={HIDDEN if _is_named(m[2], m[3]) else m[3]}", text)
