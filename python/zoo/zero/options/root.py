"""Keys of a document's root that belong to ZeRO: how gradients travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from zoo.config import Config, Section
from zoo.config.fates import Fate, refused, translated, unnecessary
from zoo.shard.placement.plan import refuses_rows


class ZeroRoot(Section):
    """How gradients travel."""

    carried_by: ClassVar[str] = "zoo.zero"

    prescale_gradients: bool = False
    """Whether gradients are divided by the number of ranks before they are added up, not after."""

    gradient_predivide_factor: float = Field(default=1.0, ge=1)
    """Divide by this before adding up and by the rest after."""

    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """Type in which gradients travel; null for the type they have (data_types.grad_accum_dtype)."""

    sparse_gradients: bool = False
    """Whether the gradient of an embedding table travels as the rows that were touched, wherever that takes at most
    half of the bytes. The mean has the same bits."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "zero_allow_untested_optimizer": unnecessary(
            "every optimizer works at stage 0 and where one rank is alone, and every elementwise one at every stage; "
            "what needs whole parameters where ranks split them is refused by name, whatever this says (through "
            "zoo.deepspeed an explicit false refuses what is not on DeepSpeed's list)", False,
            nothing=(True,),
        ),
        "zero_force_ds_cpu_optimizer": unnecessary(
            "every optimizer works on offloaded states", True, nothing=(False,)
        ),
        "fp32_allreduce": translated({"communication_data_type": {True: "fp32"}}),
        "seq_parallel_communication_data_type": refused(
            "gradients are reduced over all data axes of the mesh in one type, communication_data_type", "fp32",
            ("fp32", "fp16", "bf16", "bfp16"),
        ),
        "gradient_allreduce_op": refused(
            "gradients are averaged; zoo.deepspeed sums them at stages 0 to 2", "mean", ("mean", "sum")
        ),
        "disable_allgather": unnecessary("a bucket is gathered by one all-gather; there are no broadcasts", False),
    }  # fmt: skip

    @field_validator("communication_data_type", mode="before")
    @classmethod
    def _spelling(cls, value: Any) -> Any:
        return "bf16" if value in ("bfp16", "bfloat16") else value

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.prescale_gradients and self.gradient_predivide_factor != 1:
            yield (
                f"gradient_predivide_factor = {self.gradient_predivide_factor:g} has no effect while "
                "prescale_gradients is true (all of the division happens before); remove one of the two"
            )
        for name in refuses_rows(config.zero_optimization) if self.sparse_gradients else ():
            yield (
                f"sparse_gradients is true, and zero_optimization.{name} is set, which reduces gradients in a way of "
                "its own; leave one of the two out"
            )
