# SPDX-License-Identifier: Apache-2.0
"""Files: whole or not at all, and a disk's refusal in one form.

A process may be killed between any two bytes that it writes. What must be whole is therefore written beside its place
and moved there: a rename happens or does not, so under its final name a file has all its bytes, or is the one before.

    write_whole("runs/a/run.json", text)

A disk that is full or read-only is an `OSError` with a number and the file's name, which is what the command line makes
its one line of. Some writers hide it: torch raises a RuntimeError while it handles the OSError, safetensors an error of
its own with the number in its text. `disk_errors` gives the OSError back.

    with disk_errors(path):
        torch.save(state, file)

No torch here.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from trimtab.errors import TrimtabError

ROOM = "make room there, then the same command with --resume (a bench: as it is) goes on; what was written is whole"
ACCESS = "choose another place, or make that one writable"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), ACCESS),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EISDIR, errno.EEXIST),
        "a file is where a folder should be, or the other way round: choose another place",
    ),
    errno.EIO: "the disk itself failed: look after it, then go on as after a full one",
}
"""What to do when the operating system refuses a file, by the number of its error."""
NUMBER = re.compile(r"\(os error (\d+)\)")
"""How Rust writes an error of the operating system."""


@contextmanager
def writing(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes its place when all went well and is gone if not; its folder must be there."""
    path = Path(path)
    draft = path.with_suffix(".tmp")
    try:
        with disk_errors(path), draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with writing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Raise what a disk refused inside as an OSError that names a file: its own, or else this one."""
    try:
        yield
    except Exception as error:
        found = _os_error(error)
        if found is None:
            raise
        if found.filename is None and found.errno is not None:  # without a number the text is all there is
            found.filename = str(path)
        if found is error:
            raise
        raise found from None


def check_plain(folder: Path) -> None:
    """Refuse a folder with a pipe or a device in it: whoever reads all its files would wait, or read for ever."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise TrimtabError(f"a folder that is read as a whole holds plain files, {path} is none: move it away")


def _os_error(error: BaseException) -> OSError | None:
    """The refusal of the operating system that an error is, was raised over, or tells of."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and (at is error or at.errno in REMEDIES):
            return at
        if number := NUMBER.search(str(at)):
            return OSError(int(number.group(1)), os.strerror(int(number.group(1))))
        at = at.__cause__ or at.__context__
    return None
