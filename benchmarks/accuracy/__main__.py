"""The command: how often infprof is right on the labelled corpus."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from benchmarks.accuracy.corpus import PARTS, corpus
from benchmarks.accuracy.floor import recorded, under_floor
from benchmarks.accuracy.judging import Answer, judge
from benchmarks.accuracy.labels import Case
from benchmarks.accuracy.scoring import as_text, score


def judged(cases: Sequence[Case], jobs: int) -> list[Answer]:
    """The answers to the cases, in order."""
    if jobs == 1:
        return [judge(case) for case in cases]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(judge, cases, chunksize=4))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="whole", help="what of the corpus (default: whole)")
    parser.add_argument("--workloads", type=int, metavar="N", help="how many workloads to draw for it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures here")
    parser.add_argument("--hide-mistakes", action="store_true", help="figures alone, for the held-out part")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    result = score(judged(list(corpus(options.part, options.workloads)), options.jobs))
    text = as_text(result)
    print(text.split("\n\nmistakes")[0] if options.hide_mistakes else text)
    found = under_floor(result, recorded())
    print(
        f"\n{time.monotonic() - begun:.0f} s; " + ("; ".join(found) if found else "nothing is under the recorded floor")
    )
    if options.json:
        options.json.write_text(
            json.dumps({"part": options.part, **result.to_dict()}, indent=1) + "\n", encoding="utf-8"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
