"""``scripts/gpu_check``: everything that only a GPU can show, in one run, as one JSON.

    command.py    the command line: which stages, in how much time; the verdict
    stages.py     THE TABLE of stages
    process.py    a stage in a process of its own, with a limit that is kept
    probe.py      what can be checked here
    record.py     the JSON, written as it goes; what a stage reports
    verdict.py    what the figures say of the bars
    place.py      where ranks run: on this machine's GPU, or on the simulated one
    kits.py       what the checks need of an array library: CuPy, torch, the simulation
    asking.py     counts what is asked of CUDA, to see who waits for the device
    machine.py  conformity.py  streaming.py  faults.py  training.py  plugin.py  costs.py  copies.py     the stages
    *_jobs.py     what their ranks do
    plot.py       a drawing of the costs

It lies in tests/ because it runs the tests' own cases and ranks. On the simulated device (``--simulate``) every stage
runs without a GPU, which is how it is tested.
"""
