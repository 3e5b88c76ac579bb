"""The section ``elasticity``: jobs whose number of ranks changes and whose batch does not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from zoo.config.batch import BatchSizeError, G, M, T
from zoo.config.fates import Fate, unnecessary
from zoo.config.section import OWN, Section
from zoo.launch.elastic import ElasticityError, Policy, shares, table

if TYPE_CHECKING:
    from zoo.config.core import Config

__all__ = ["Elasticity"]


class Elasticity(Section):
    """Any number of data-parallel ranks trains with the same global batch, and with the same losses up to rounding.

    Each rank gets its share of the batch, which may be one sample more than another's, in micro-batches of at most
    train_micro_batch_size_per_gpu, as many on every rank; and each micro-batch's loss counts by its samples. Nothing
    else is needed to go on with more or fewer ranks than a checkpoint was made with.
    """

    runner: ClassVar[str] = "plain"

    enabled: bool = False
    max_train_batch_size: int = Field(default=2000, gt=0)
    """The largest global batch, where train_batch_size does not say which: of the documented candidates the one that
    the most numbers of ranks part evenly."""
    micro_batch_sizes: list[int] = Field(default=[2, 4, 6], min_length=1)
    """Samples that a rank may take at a time, where train_micro_batch_size_per_gpu does not say how many it may."""
    min_gpus: int = Field(default=1, gt=0)
    """The fewest data-parallel ranks with which the job may go on."""
    max_gpus: int = Field(default=10000, gt=0)
    """The most of them."""
    prefer_larger_batch: bool = True
    """Of two batches that as many numbers of ranks part evenly, whether the larger one is taken."""
    ignore_non_elastic_batch_info: bool = False
    """Whether the batch is found by this section alone, whatever sizes the document has."""
    resume_from: Annotated[str | None, OWN] = None
    """A folder of checkpoints: initialize goes on from the newest whole one in it, and from the beginning where there
    is none."""

    fates: ClassVar[Mapping[str, Fate]] = {
        "version": unnecessary("shares of a batch need no table of nodes", 0.2),
        "min_time": unnecessary("nothing waits for more ranks", 0),
        "num_gpus_per_node": unnecessary("a batch is parted over ranks, wherever they are", 1),
        "model_parallel_size": unnecessary("the mesh says which ranks share a layer", 1),
    }

    def contradictions(self, config: Config) -> Iterable[str]:
        if self.min_gpus > self.max_gpus:
            yield f"elasticity.min_gpus is {self.min_gpus}, more than max_gpus, {self.max_gpus}; swap them"

    def sizes(self, given: Mapping[str, int], ranks: int) -> dict[str, int]:
        """All of T, M and G for these data-parallel ranks; M is of the rank that has most.

        Raises:
            BatchSizeError: the section allows no such number of ranks, or no batch; or the document says G.
        """
        if not self.min_gpus <= ranks <= self.max_gpus:
            raise BatchSizeError(
                f"elasticity: {ranks} data-parallel ranks; allowed are {self.min_gpus} to {self.max_gpus} (min_gpus, "
                "max_gpus)"
            )
        if self.ignore_non_elastic_batch_info:
            given = {}
        if G in given:
            raise BatchSizeError(
                f"{G} follows from the number of ranks where elasticity is enabled; leave it out, or set "
                "elasticity.ignore_non_elastic_batch_info"
            )
        wrong = [one for one in self.micro_batch_sizes if one < 1]
        if wrong:
            raise BatchSizeError(
                f"elasticity.micro_batch_sizes {self.micro_batch_sizes} has {wrong[0]}; give whole numbers from 1 on"
            )
        batch, most = given.get(T), given.get(M)
        try:
            if batch is None:
                batch = table(self._policy()).batch
            if most is None:
                even = [one for one in self.micro_batch_sizes if batch % (one * ranks) == 0]
                most = max(even or self.micro_batch_sizes)
            each = shares(batch, ranks, most)
        except ElasticityError as error:
            raise BatchSizeError(f"elasticity: {error}") from None
        return {T: batch, M: max(map(max, each)), G: len(each[0])}

    def _policy(self) -> Policy:
        return Policy(
            micro_batches=self.micro_batch_sizes, max_batch=self.max_train_batch_size, min_ranks=self.min_gpus,
            max_ranks=self.max_gpus, prefers_larger=self.prefer_larger_batch,
        )  # fmt: skip


def of(values: Mapping[str, Any]) -> Elasticity | None:
    """The section of a document, where it is enabled; None also where validation will say what is wrong with it."""
    from pydantic import ValidationError

    section = values.get("elasticity")
    if not isinstance(section, Mapping) or section.get("enabled") is not True:
        return None
    try:
        return Elasticity.model_validate(dict(section))
    except ValidationError:
        return None
