"""What a compression technique is: sites, transforms, and the technique that makes a transform for a site.

* A *site* is one tensor of one module: a parameter of it, its input or its output.
* A *transform* stands at a site and changes the tensor on its way: v → T(v). It is differentiable (where it rounds,
  straight through) and, before its step has come, not there at all.
* A *technique* looks at modules and makes transforms. It is one file, registered as ``compression_technique.<name>``
  with the name of its section in ``compression_training``.

Several transforms may stand at one site: masks come before quantisers, so that what is rounded is what is left.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from zoo.compression.place import Place

if TYPE_CHECKING:
    from zoo.comm import Communicator
    from zoo.compression.config import GroupSection, TechniqueSection

SectionT = TypeVar("SectionT", bound="TechniqueSection")
GroupT = TypeVar("GroupT", bound="GroupSection")
Where = Literal["weight", "input", "output"]
"""Which tensor of a module: a parameter, the first tensor that it is called with, the first that it returns."""


POST_TRAINING = "post_training"
"""In the place of a technique: what is quantised after training, and by no configuration."""


class Order(enum.IntEnum):
    """Which transform of a site comes first."""

    MASK = 0
    QUANTISER = 1
    LAST = 2


@dataclass(frozen=True, kw_only=True)
class Site:
    """One tensor of one module."""

    module: str
    """The module's name in the whole model, "" for the model itself."""
    where: Where
    parameter: str = ""
    """Of a weight: its name, as seen from the module; "out_proj.weight" is one of a child that is never called."""
    technique: str = ""
    """Name of the technique that stands here."""
    group: str = ""
    """What asked for it: "compression_training.weight_quantization.different_groups.wq1"."""

    @property
    def name(self) -> str:
        """The tensor's name: "encoder.0.fc.weight", "encoder.0.fc:input"."""
        if self.where == "weight":
            return f"{self.module}.{self.parameter}" if self.module else self.parameter
        return f"{self.module}:{self.where}"


class Transform:
    """Changes the tensor of one site. Subclasses are plain classes of some module, so that models are copied and
    pickled with them; state that is no function of the step is plain values and tensors.

    Called on every rank alike: under ZeRO stage 3 inside of the forward of the weight's unit, where it is gathered.
    What a transform computes is the same on all ranks if its value is. Of a weight that is split along mesh axes
    (``place.along``) it gets this rank's part, and gives T of the whole's: ``place`` has the ranks with the others.

    Args:
        site: where it stands.
        offset: steps that are over before it begins.

    Attributes:
        active: whether it is called at this step. Where no transform of a module is, the module's own forward runs,
            untouched.
        training: whether the module whose forward calls it is in training mode; set before each call.
        used: it was called since somebody has set this to False.
        place: where its tensor is.
    """

    order: ClassVar[Order]
    """Where it stands among the transforms of its site."""
    remembers: bool = False
    """Whether it has a state that is no function of the step and no parameter."""
    takes: str = ""
    """Of a mask of whole units: along which dim. Two that take along one contradict each other."""
    keeps_zero: bool = False
    """Whether a zero stays zero, and others are what they are without it; see :func:`applied`."""

    now: Mapping[str, Tensor] = MappingProxyType({})
    """While it is called: what the module has under the names of ``learned``. That is another parameter after
    ``load_state_dict(..., assign=True)``, and a tensor within ``torch.func.functional_call``."""
    asked: Mapping[str, Any] | None = None
    """What its section asked for when it was made; a configuration that comes later must ask for the same."""
    place: Place = Place()
    together: Shared | None = None
    """What it shares with others."""

    def __init__(self, site: Site, *, offset: int = 0) -> None:
        self.site, self.offset = site, offset
        self.active = self.training = self.used = False
        self.set_step(0)

    def __call__(self, value: Tensor) -> Tensor:
        """T(value): same shape, dtype and device; never written in place. With gradients."""
        raise NotImplementedError

    def set_step(self, step: int) -> None:
        """``step`` steps are over. What follows from it (``active``, bits) is a pure function of it."""
        self.active = step >= self.offset

    def fixed(self, value: Tensor) -> Tensor:
        """What ``redundancy_clean`` writes in the place of a weight: T at the end of its schedule, no gradients."""
        return self(value.detach()).detach()

    @property
    def learned(self) -> Mapping[str, nn.Parameter]:
        """Parameters of its own, such as scores of a mask. They are registered under these names on the site's module,
        and on all that share its weight, and trained and sharded as any other."""
        return {}

    def placed(self) -> None:
        """``place`` is set, with its ranks. Collective along them, before anything is sharded."""

    @property
    def key(self) -> str:
        """The name of its state in checkpoints, on every rank."""
        return f"{self.site.name}/{self.site.technique}"

    def state_dict(self) -> dict[str, Any]:
        """What is no function of the step and no parameter: masks, ranges. Empty for most. Of whole tensors, so that
        it is loaded on any mesh; collective along ``place.along``."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        if state:
            raise ValueError(f"{self.site.name}: a {type(self).__name__} has no state, and was given {sorted(state)}.")


@runtime_checkable
class Observes(Protocol):
    """A transform that learns from what it sees in training, such as the range of an input. Ranks see different data;
    what they have seen is brought together after each update, so that all go on with the same."""

    def seen(self) -> Tensor:
        """(k,) fp32, what this rank has seen since the last ``commit``. Ranks are combined by the larger element;
        -infinity: nothing."""

    def commit(self, seen: Tensor) -> None:
        """An update was made, before which all ranks together have seen this. Not called for a step that is skipped."""

    def forget(self) -> None:
        """Drop what was seen: the step is skipped."""


@runtime_checkable
class Averages(Protocol):
    """A transform that learns from sums over what ranks see, such as gradients. They are averaged over ranks after each
    update, so that all go on with the same."""

    def summed(self) -> Tensor | None:
        """The sum of this rank since the last ``take``, fp32, any shape; None, on every rank alike: nothing counts in
        this step."""

    def take(self, mean: Tensor) -> None:
        """An update was made, before which ranks have seen this on average. Not called for a step that is skipped."""

    def drop(self) -> None:
        """Drop what was seen: the step is skipped."""


@runtime_checkable
class MadeOnce(Protocol):
    """A mask that the first forward makes. Where a module is called or not as data say (an expert), ranks that have not
    called it in the step take the mask of those that have."""

    @property
    def made(self) -> Tensor | None:
        """The mask, bool, of a shape that all ranks with this tensor have; None before it is made."""

    @property
    def made_shape(self) -> tuple[int, ...]:
        """Of the mask."""

    def take_made(self, mask: Tensor) -> None:
        """Other ranks have made it."""


class Counts(Protocol):
    """Ranks with other transforms."""

    @property
    def everyone(self) -> Communicator:
        """All of them."""

    def owns(self, key: str) -> bool:
        """Whether this rank is the first that has the transform of this ``key``."""


class Shared(Protocol):
    """What several transforms share, such as a ranking of all. It is there on every rank, also where there is none of
    its transforms, and told of every step after they are."""

    ranks: Counts | None
    """Set where ranks have other transforms."""
    loaded: bool
    """Set when a checkpoint was loaded: the next step does not follow from the last."""

    def set_step(self, step: int) -> None:
        """``step`` steps are over. Collective."""


class Technique(Generic[SectionT, GroupT]):
    """Makes transforms for the modules that a section names.

    Args:
        section: of ``compression_training``.
        seed: of whatever is drawn.
    """

    name: ClassVar[str]
    """Of the section and in the registry."""

    def __init__(self, section: SectionT, *, seed: int = 0) -> None:
        self.section, self.seed = section, seed

    def groups(self) -> Mapping[str, GroupT]:
        """The groups by name."""
        return self.section.different_groups  # type: ignore[return-value]

    def place(self, group: str) -> str:
        """Where a group is in a configuration, as errors name it."""
        return f"compression_training.{self.name}.different_groups.{group}"

    def sites(self, module: nn.Module) -> Sequence[tuple[Where, str]]:
        """The tensors of ``module`` that it can change, (where, name of the parameter or ""); empty: none."""
        raise NotImplementedError

    def transform(self, site: Site, group: GroupT, module: nn.Module) -> Transform:
        """The transform for a site. Called once for each, before anything is sharded, on every rank.

        Args:
            module: that of the site; its weight is ``parameter_of(module, site.parameter)``, whole.

        Raises:
            ValueError: options of the group that do not fit the module; the sentence names ``site.name`` and
                ``site.group``.
        """
        raise NotImplementedError

    @property
    def excluded(self) -> Sequence[str]:
        """Patterns of modules that are left alone, whatever the groups mean."""
        return ()

    def related(self, model: nn.Module, made: Sequence[Transform]) -> Sequence[tuple[nn.Module, Transform]]:
        """Transforms on further modules, that follow from those of all groups. Called once, after they are made and
        before anything is attached; it may refuse. Most have none."""
        return ()

    def shared(self) -> Sequence[Shared]:
        """What its transforms share. Most share nothing."""
        return ()

    def adopt(self, transform: Transform, module: nn.Module, parameter: str) -> Transform:
        """The transform of a weight that a stage of a pipeline has made, for a stage that has the weight too and whose
        patterns do not mean it.

        Args:
            transform: a copy. module, parameter: that have the weight here.
        """
        raise NotImplementedError(
            f"{transform.site.group}: {transform.site.name} is one with a weight of another stage, which is not pruned "
            "so under the name that it has there. Let the patterns mean both names, or neither."
        )

    def shrink(self, model: nn.Module, transforms: Sequence[Transform]) -> None:
        """``redundancy_clean`` has written what its transforms left; take away what is zero now. Most do nothing."""


_ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")


def weights_of(module: nn.Module) -> list[str]:
    """The parameters of a module that count as its weights: ``weight`` where it has two dimensions or more and is of
    floating point, as of linear layers, convolutions and embeddings; of ``nn.MultiheadAttention`` its projections,
    that of the output too, whose own forward it never calls."""
    if isinstance(module, nn.MultiheadAttention):
        return [name for name in _ATTENTION if parameter_of(module, name) is not None]
    weight = module._parameters.get("weight")
    return ["weight"] if weight is not None and weight.dim() >= 2 and weight.is_floating_point() else []


def inner_weights(model: nn.Module) -> set[int]:
    """``id`` of modules whose weights belong to the module around them."""
    return {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}


def owner_of(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds a parameter, and its name there."""
    *above, name = path.split(".")
    for part in above:
        module = module._modules[part]  # type: ignore[assignment]
    return module, name


def parameter_of(module: nn.Module, path: str) -> nn.Parameter | None:
    """The parameter at a path, None where there is none."""
    owner, name = owner_of(module, path)
    return owner._parameters.get(name)


def applied(
    module: nn.Module, transforms: Iterable[Transform], value: Tensor, call: Callable[[Transform, Tensor], Tensor]
) -> Tensor:  # fmt: skip
    """A tensor of a module through the transforms of its site, ``call(transform, value)`` for each.

    What is zero behind a mask stays zero, also where a quantiser has no zero; gradients are those of the transforms.
    """
    masked = False
    for transform in transforms:
        transform.now = {key: module._parameters[key] for key in transform.learned}  # type: ignore[misc]
        try:
            changed = call(transform, value)
        finally:
            transform.__dict__.pop("now", None)
        if masked and not transform.keeps_zero and transform.order != Order.MASK:
            changed = changed - changed.detach().where(value.detach() == 0, 0)
        masked = masked or transform.order == Order.MASK
        value = changed
    return value


def in_order(transforms: Iterable[Transform]) -> list[Transform]:
    """The transforms of one site as they are applied.

    Raises:
        ValueError: two of them contradict each other: both quantise, or one technique asks twice.
    """
    found = sorted(transforms, key=lambda t: (t.order, t.site.technique))
    for first, second in itertools.combinations(found, 2):
        twice = first.site.technique == second.site.technique or first.order == second.order == Order.QUANTISER
        if twice or (first.takes and first.takes == second.takes):
            raise ValueError(
                f"{first.site.name} is changed twice in one way: {first.site.group or first.site.technique} and "
                f"{second.site.group or second.site.technique} both apply to it (a tied weight counts as one). Let the "
                "patterns of one of them leave it out."
            )
    return found
