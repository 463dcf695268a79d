"""Train four steps under a launcher of ranks: `torchrun launched_ddp_program.py once|fail|forever`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"rank {dist.get_rank()} {sys.argv[1:]}\n")  # one write: torchrun starts Python without a buffer
sys.stdout.flush()
if sys.argv[1] == "fail" and dist.get_rank() == 1:
    sys.exit(5)
while sys.argv[1] == "forever":
    dist.barrier()
dist.destroy_process_group()
