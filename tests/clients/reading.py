"""Print the logits of exported weights for the fixed text of ``examples/clients``, as JSON.

python tests/clients/reading.py EXPORT [BASE]      BASE: the model that EXPORT is an adapter of
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/clients"))


def main() -> None:
    from common import Text

    export, *base = sys.argv[1:]
    model = AutoModelForCausalLM.from_pretrained(base[0] if base else export, dtype=torch.float32)
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, export)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=Text(2, seed=1).tokens).logits
    print(json.dumps(logits.flatten().tolist()))


if __name__ == "__main__":
    main()
