"""The same step under zoo's stage 2."""

import torch
import torch.distributed as dist
from torch import nn

from zoo.zero import Stage2Optimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = Stage2Optimizer(model, optimizer="AdamW", lr=1e-3)
loss = model(torch.full((4, 64), float(dist.get_rank()))).square().mean()
loss.backward()
optimizer.step()
dist.destroy_process_group()
