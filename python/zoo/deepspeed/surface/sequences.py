"""Long sequences."""

from __future__ import annotations

from zoo.deepspeed.modules import Name, Refused, Table

_TILED = "zoo.deepspeed.adapters.tiled_compute"
_SHARED = "zoo.deepspeed.adapters.sequence_parallel"
_CHUNKS = "no chunks of sequences go to the host; what activation checkpointing keeps can."

TABLE: Table = {
    "runtime.sequence_parallel.ulysses_sp": {
        **{
            name: Name(f"{_TILED}:{name}", "compute_params makes no difference: all that needs a gradient gets it.")
            for name in ("SequenceTiledCompute", "TiledMLP", "sequence_tiled_compute")
        },
        "UlyssesSPAttentionHF": Name(f"{_SHARED}:UlyssesSPAttentionHF", "flex_attention is refused."),
        "UlyssesSPDataLoaderAdapter": f"{_SHARED}:UlyssesSPDataLoaderAdapter",
        "TiledFusedLogitsLoss": Name(
            f"{_TILED}:TiledFusedLogitsLoss",
            "backward computes the logits again; what the loss is multiplied by reaches parameters too.",
        ),
    },
    "runtime.sequence_parallel.parallel_state_sp": "zoo.deepspeed.adapters.sequence_ranks",
    "sequence.fpdt_layer": {
        name: Refused(_CHUNKS) for name in ("FPDT_Attention", "FPDT_FFN", "FPDT_InputConstruct", "FPDT_LogitsLoss")
    },
    "sequence.layer": {
        "apply_rotary_pos_emb": f"{_TILED}:apply_rotary_pos_emb",
        "DistributedAttention": Name(f"{_SHARED}:DistributedAttention", "P divides the number of heads."),
    },
}
