# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided fuzzing of what trimtab reads: libFuzzer, through atheris, keeps whatever reaches new code.

    python scripts/fuzz.py TARGET --runs 20000        targets are those of tests/reliability/fuzzing.py
    python scripts/fuzz.py TARGET --again FILE        one input once more, with its traceback

An input is the number of a file of the target (one byte) and the bytes of that file; the others stay valid. It starts
from valid files, and half of its mutations are ours, which know the files' structure. It stops at the first input that
ends in anything but one of trimtab's own errors, takes longer than 20 s or more memory than 4 GiB, and leaves that
input in a file. `pip install 'trimtab[fuzz]'`; there is atheris for Linux, and for the Pythons that it knows.
"""

import argparse
import random
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "reliability"))

try:
    import atheris
except ImportError:
    sys.exit("error: coverage-guided fuzzing needs atheris, which is not installed: pip install 'trimtab[fuzz]'")

with atheris.instrument_imports(include=["trimtab"]):  # pyright: ignore[reportAttributeAccessIssue]
    import trimtab.cli.main
    import trimtab.control.record
    import trimtab.lab.chat
    import trimtab.lab.config
    import trimtab.lab.dcp
    import trimtab.lab.downstream.arm
    import trimtab.lab.downstream.results
    import trimtab.lab.faults
    import trimtab.lab.gather
    import trimtab.lab.gguf
    import trimtab.lab.noise
    import trimtab.lab.pretrained
    import trimtab.lab.subject
    import trimtab.lab.train
    import trimtab.report.compare
    import trimtab.report.follow
    import trimtab.report.markdown
    import trimtab.report.page
    import trimtab.report.postmortem
    import trimtab.report.whatif
    import trimtab.retrain.export
    import trimtab.retrain.walk  # noqa: F401

import damage  # pyright: ignore[reportMissingImports]
import fuzzing  # pyright: ignore[reportMissingImports]
import targets  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Fuzz one target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", choices=fuzzing.TARGETS)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--again", type=Path, help="an input that failed")
    parser.add_argument("--keep", type=Path, default=Path(), help="where an input that fails is left")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        bench = fuzzing.Bench(given.target, Path(place) / "files")
        names = list(bench.valid)

        def read(data: bytes) -> None:
            if not data:
                return
            name = names[data[0] % len(names)]
            try:
                (bench.folder / name).write_bytes(data[1:])
                targets.TOUCHED.add(name)
                with fuzzing.silent():
                    bench.target.read(bench.folder)
            except targets.ALLOWED:
                pass
            finally:
                bench.restore()

        def mutate(data: bytes, most: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if not data or rng.random() < 0.5:
                return atheris.Mutate(data, most)
            name = names[data[0] % len(names)]
            try:
                made = damage.damaged(name, data[1:], rng)
            except Exception:  # it was damaged before, and cannot be taken apart any more
                made = damage.damage_bytes(data[1:], rng)
            return (data[:1] + made)[:most]

        if given.again is not None:
            read(given.again.read_bytes())
            return
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        for number, data in enumerate(bench.valid.values()):
            (corpus / f"{number}").write_bytes(bytes([number]) + data)
        longest = 2 * max(map(len, bench.valid.values()))
        options = [f"-runs={given.runs}", f"-seed={given.seed}", f"-max_len={longest}", "-timeout=20", "-verbosity=1"]
        options += ["-rss_limit_mb=4096", f"-artifact_prefix={given.keep}/", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], read, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
