"""``scripts/gpu_check``: everything that only a GPU can show, in one run, as one JSON.

    command.py    the command line, and the run through the stages
    stages.py     THE TABLE of stages, in their order
    process.py    the process that does stages, with limits that are kept
    record.py     the JSON, written as it goes; what a stage reports
    verdict.py    what the figures say of the bars      summary.py    what a person reads at the end
    probe.py      which array libraries work here
    place.py      where ranks run: on this machine's GPU, or on the simulated one; Ranks, anew after one that hung
    forked.py     simulated ranks that start fast
    kits.py       what the checks need of an array library: CuPy, torch, the simulation
    asking.py     counts what is asked of CUDA, to see who waits for the device
    contenders.py    who is compared in the stages on costs
    machine.py  streaming.py  faults.py  plugin.py  conformity.py  costs.py  training.py  copies.py     the stages
    *_jobs.py     what their ranks do
    plot.py       a drawing of the costs

It lies in tests/ because it runs the tests' own cases and ranks. On the simulated device (``--simulate``) every stage
runs without a GPU, which is how it is tested.
"""
