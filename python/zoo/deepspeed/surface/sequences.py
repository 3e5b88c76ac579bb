"""Long sequences."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Table

_TILED = "zoo.deepspeed.adapters.tiled_compute"

TABLE: Table = {
    "runtime.sequence_parallel.ulysses_sp": {
        **{
            name: Name(f"{_TILED}:{name}", "compute_params makes no difference: all that needs a gradient gets it.")
            for name in ("SequenceTiledCompute", "TiledMLP", "sequence_tiled_compute")
        },
        "TiledFusedLogitsLoss": Name(
            f"{_TILED}:TiledFusedLogitsLoss",
            "backward computes the logits again; what the loss is multiplied by reaches parameters too.",
        ),
    },
    "sequence.layer": {"apply_rotary_pos_emb": f"{_TILED}:apply_rotary_pos_emb"},
}
