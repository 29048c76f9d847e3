"""Runs mistakes, shows what they lead to, and writes the page of errors.

python -m tests.contract.mistakes            all of them
python -m tests.contract.mistakes secret     those with this in their titles
python -m tests.contract.mistakes --write    writes docs/errors.md
"""

from __future__ import annotations

import argparse
import sys

from tests.contract.mistakes import page
from tests.contract.mistakes.running import alike, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.contract.mistakes", description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of titles")
    parser.add_argument("--write", action="store_true", help="write docs/errors.md")
    parser.add_argument("--lacking", action="store_true", help="leave out those with a row")
    arguments = parser.parse_args()
    known = page.load()
    failed = 0
    for mistake in page.ALL:
        if arguments.parts and not any(part in mistake.title for part in arguments.parts):
            continue
        if arguments.lacking and mistake.title in known:
            continue
        try:
            outcome = run(mistake)
        except AssertionError as error:
            failed += 1
            print(f"\n## {mistake.title}: NO MESSAGE\n{error}", flush=True)
            continue
        before = known.get(mistake.title)
        is_same = before is not None and alike(before.message) == alike(outcome.message)
        print(f"\n## {mistake.title} ({outcome.seconds:.1f} s){'' if is_same else ', new'}")
        print(outcome.message, flush=True)
        known[mistake.title] = outcome
        failed += not is_same and not arguments.write
        if arguments.write:
            page.store(known)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
