"""One rank of PyTorch: meets the others as its launcher says, and sums with them over gloo."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
total = torch.full((1000,), float(rank + 1))
dist.all_reduce(total)
assert torch.all(total == world * (world + 1) / 2), total[:3]
gathered = [None] * world
dist.all_gather_object(gathered, {"rank": rank})
assert gathered == [{"rank": other} for other in range(world)], gathered
dist.barrier()
print(f"{world} ranks agree on {total[0].item()}", flush=True)
dist.destroy_process_group()
