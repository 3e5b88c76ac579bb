"""Saving and loading 1.2 GB of state on two ranks, beside torch.save, DCP and DeepSpeed. See README.md."""
