"""Model compression: quantisation, pruning, and students that begin as their teachers.

* :func:`init_compression` and :func:`redundancy_clean` around training; an engine does the first by itself.
* :class:`CompressionScheduler` for training loops of one's own.
* :func:`logits_loss`, :func:`hidden_loss` and :func:`attention_loss`: a student learns from its teacher;
  :func:`xtc` makes one with fewer layers and weights of 1 or 2 bits.
* :class:`Technique`, :class:`Transform` and :class:`Site`: what one more technique is made of.
"""

from __future__ import annotations

from importlib.metadata import version

from zoo.compression.attach import attach, attached_to, class_of, detach, transforms_of
from zoo.compression.compressing import init_compression, redundancy_clean
from zoo.compression.config import CompressionConfig
from zoo.compression.distillation import attention_loss, hidden_loss, logits_loss
from zoo.compression.scheduler import CompressionScheduler
from zoo.compression.technique import Observes, Order, Site, Technique, Transform
from zoo.compression.xtc import Student, xtc
from zoo.registry import Subpackage

__all__ = [
    "ABOUT",
    "CompressionConfig",
    "CompressionScheduler",
    "Observes",
    "Order",
    "Site",
    "Student",
    "Technique",
    "Transform",
    "attach",
    "attached_to",
    "attention_loss",
    "class_of",
    "detach",
    "hidden_loss",
    "init_compression",
    "logits_loss",
    "redundancy_clean",
    "transforms_of",
    "xtc",
]

ABOUT = Subpackage(
    name="compression",
    version=version("zoo-compression"),
    summary="Model compression: weights and inputs with few bits, schedules, students that begin as their teachers.",
)
"""What the registry tells about this distribution, under the kind "subpackage"."""
