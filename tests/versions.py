"""What the oldest torch that zoo supports does not offer to other backends than its own."""

from __future__ import annotations

import pytest
import torch

_OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 12)

needs_groups_of_any_backend = pytest.mark.skipif(
    _OLD, reason="torch 2.11 splits groups, monitors barriers and batches messages of its own backends only"
)
