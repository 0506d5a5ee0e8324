"""A rank of test_explain.py: prints the texts of explain() before and after joining as one line of JSON."""

from __future__ import annotations

import json
import sys

import unicoll as dist


def main() -> None:
    before = dist.explain()
    # a made-up MPI environment would mislead a real MPI library
    dist.init_process_group("gloo" if dist.is_mpi_available() else None, timeout=60)
    after = dist.explain()
    dist.barrier()
    report = {"rank": dist.get_rank(), "before": before, "after": after, "backend": dist.get_backend()}
    dist.destroy_process_group()
    report["at the end"] = dist.explain()
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
