#!/usr/bin/env python3
"""Fuzzes the parsers of peers' input: `fuzz.py [TARGET]`.

Inputs are valid ones with flipped bits, truncated or spliced, with other lengths and extreme
numbers, and random bytes. Findings are exceptions that the parser does not document, a handshake
that succeeds without its proof, an unpickling or other execution of code, a hang, excessive memory,
and a server that no longer serves its other clients. Each is printed with the seed and the input in
hexadecimal digits, which `--replay` runs again; then the exit code is 1.

Servers and groups run without their threads: an input is sent over a socketpair and the handler is
called. The codec and the store's table read from memory. The targets are in scripts/fuzzing.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:1] = [str(SCRIPTS.parent), str(SCRIPTS)]  # the library before this directory

from fuzzing.group import Collectives, Messages  # noqa: E402 - needs the path
from fuzzing.harness import Hung, Target, check, generate, watched  # noqa: E402
from fuzzing.parsers import Codec, Handshake, Records, Seals  # noqa: E402
from fuzzing.servers import Frames, Store  # noqa: E402

MOST_FINDINGS = 10
TARGETS: dict[str, type[Target]] = {
    "codec": Codec,
    "handshake": Handshake,
    "records": Records,
    "seals": Seals,
    "store": Store,
    "frames": Frames,
    "messages": Messages,
    "collectives": Collectives,
}


def fuzz(name: str, inputs: int, seed: int) -> int:
    """Runs this many inputs; returns the number of findings."""
    rng = random.Random(f"{name} {seed}")
    target = TARGETS[name]()
    found: set[str] = set()
    taken = done = 0
    started = time.monotonic()
    try:
        with watched():
            for done in range(1, inputs + 1):
                data = generate(rng, target)
                try:
                    taken += check(target, data)
                except (Exception, Hung) as error:
                    report(name, seed, done, data, error, found)
                    target.close()
                    target = TARGETS[name]()
                if len(found) >= MOST_FINDINGS:
                    break
    finally:
        target.close()
    seconds = time.monotonic() - started
    print(
        f"{name}: {done} inputs, {taken} taken, {len(found)} findings, {seconds:.1f} s,"
        f" {done / seconds:.0f} a second",
        flush=True,
    )
    return len(found)


def report(
    name: str, seed: int, number: int, data: bytes, error: BaseException, found: set[str]
) -> None:
    """Prints a finding, once per line of code that raises it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = f"{type(error).__name__} {place.filename}:{place.lineno}"
    if kind in found:
        return
    found.add(kind)
    print(f"FINDING {name}, seed {seed}, input {number}: {type(error).__name__}: {error!s:.300}")
    print("".join(traceback.format_tb(error.__traceback__)[-3:]).rstrip())
    print(f"  fuzz.py {name} --replay {data.hex()}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), help="default: all of them")
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="number of inputs per target (100000)"
    )
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: random"
    )
    parser.add_argument("--replay", metavar="HEX", help="run one input again")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if args.replay is not None:
        if args.target is None:
            parser.error("--replay needs the target")
        target = TARGETS[args.target]()
        with watched():
            print("taken" if check(target, bytes.fromhex(args.replay)) else "refused")
        target.close()
        return 0
    print(f"seed {args.seed}", flush=True)
    findings = sum(
        fuzz(name, args.inputs, args.seed) for name in ([args.target] if args.target else TARGETS)
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
