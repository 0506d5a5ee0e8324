"""``scripts/gpu_check``: all tests and measurements that need a GPU, in one run, with one JSON file as the result.

    command.py    the command line, and the run through the stages
    stages.py     the table of stages, in their order, and the process that runs them, with time limits
    record.py     reports of stages; the JSON file, rewritten during the run
    results.py    the verdict, the bars, the summary at the end, a plot of the costs
    place.py      ranks on this machine's GPU, or on the simulated one; Ranks, restarted after one hangs
    kits.py       the interface of the checks to an array library: CuPy, torch, the simulation
    contenders.py    the libraries that the stages on costs compare
    machine.py  several.py  programs.py  faults.py  conformity.py  costs.py  training.py  copies.py     the stages
    *_jobs.py     programs and other functions that ranks of these stages run

It is in tests/ because it uses the tests' cases and ranks. On the simulated device (``--simulate``) every stage
runs without a GPU, which is how it is tested.
"""
