"""``scripts/gpu_check``: all tests and measurements that need a GPU, in one run, with one JSON file as the result.

    command.py    the command line, and the run through the stages
    stages.py     the table of stages, in their order
    process.py    the process that runs the stages, with time limits
    record.py     the JSON file, rewritten during the run; reports of stages
    verdict.py    the verdict and the bars      summary.py    the summary at the end
    probe.py      detection of array libraries
    place.py      ranks on this machine's GPU, or on the simulated one; Ranks, restarted after one hangs
    forked.py     simulated ranks that start fast
    kits.py       the interface of the checks to an array library: CuPy, torch, the simulation
    call_counts.py    counts of CUDA calls by thread, to find waits for the device
    contenders.py    the libraries that the stages on costs compare
    machine.py  streaming.py  faults.py  plugin.py  conformity.py  costs.py  training.py  copies.py     the stages
    *_jobs.py     the functions that their ranks run
    plot.py       a plot of the costs

It is in tests/ because it uses the tests' cases and ranks. On the simulated device (``--simulate``) every stage
runs without a GPU, which is how it is tested.
"""
