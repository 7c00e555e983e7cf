"""`python -m release`: does steps of a release on this machine; nothing is uploaded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from release import notes
from release.place import Place, ReleaseError
from release.steps import STEPS, clear, perform
from release.table import as_markdown


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    made.add_argument("steps", nargs="+", choices=[*STEPS, "all"], metavar="STEP")
    made.add_argument("--out", type=Path, default=Place.out, help="folder of all that is made")
    made.add_argument("--tag", default="", help="refuse to go on unless this tag is the version's")
    made.add_argument("--image", default=Place.image, help="name of the image, without a tag")
    made.add_argument("--platform", default="", help="of the image, as linux/arm64")
    made.add_argument("--audit", default=Place.audit, choices=("required", "if-reachable"))
    made.add_argument("--table", type=Path, help="file for the table, too")
    return made


def main(words: Sequence[str]) -> int:
    """Do the steps, print what they made; return the exit status."""
    given = parser().parse_args(words)
    place = Place(out=given.out, image=given.image, platform=given.platform, audit=given.audit)
    try:
        if given.tag:
            notes.check_tag(place, given.tag)
        if "all" in given.steps:
            clear(place)
        names = list(STEPS) if "all" in given.steps else given.steps
        records = perform(place, names, lambda line: print(line, flush=True))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    table = as_markdown(records)
    print(table)
    if given.table:
        given.table.write_text(table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
