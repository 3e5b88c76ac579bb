"""The first step of a small model under torch's DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = model(torch.full((4, 64), float(dist.get_rank()))).square().mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
