import numpy as np

import unicoll as dist

dist.init_process_group()  # rank, size and address come from the launcher
x = np.full(4, dist.get_rank() + 1.0)
dist.all_reduce(x)  # in place, on every rank
work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
work.wait()
print(dist.get_rank(), x)
dist.destroy_process_group()
