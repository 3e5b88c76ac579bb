"""A loop of Accelerate that says nothing of DeepSpeed: the YAML of ``accelerate launch`` does.

It prints a line of JSON: what it ran with, the mean loss of each micro-batch over ranks, and the sum of all weights.
"""

from __future__ import annotations

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCH, BATCHES, RATE = 4, 16, 1e-2


def net() -> torch.nn.Sequential:
    """The same on every rank and in the test."""
    torch.manual_seed(3)
    layers = (torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    return torch.nn.Sequential(*layers)  # of which fp8 converts the one in the middle


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (64, 8) and their targets (64, 1)."""
    inputs = torch.randn(MICRO_BATCH * BATCHES, 8, generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


def main() -> None:
    accelerator = Accelerator()
    model = net()
    model.config = type("Config", (), {"hidden_size": 16})()  # type: ignore[assignment]  # sizes of buffers "auto"
    loader = DataLoader(TensorDataset(*data()), batch_size=MICRO_BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            inputs = inputs.to(next(model.parameters()).dtype)
            loss = torch.nn.functional.mse_loss(model(inputs).float(), targets.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found = {
            "engine": type(model).__name__,
            "stage": model.zero_optimization_stage(),
            "processes": accelerator.num_processes,
            "layers": [type(layer).__name__ for layer in model.module],
            "losses": losses,
            "weights": sum(value.double().sum().item() for value in state.values()),
        }
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
