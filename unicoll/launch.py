"""``python -m unicoll.launch``: the launcher with the interface of torch.distributed.launch.

It is :mod:`unicoll.run`, except that the program gets ``--local-rank=N`` as its first argument
unless ``--use-env`` is given. ``unirun``, as torchrun, never gives it: programs read LOCAL_RANK.
"""

import sys

from unicoll.run import main

if __name__ == "__main__":
    sys.exit(main(as_torchs_launch=True))
