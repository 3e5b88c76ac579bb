"""The core's own components: one line each, and nothing is imported until a name is asked for.

A subpackage of the core adds its lines here. A package outside the core declares the same thing as entry points of the
group ``zoo.components`` (see README.md).
"""

from __future__ import annotations

__all__ = ["CORE"]

CORE: dict[str, dict[str, str]] = {
    "config_section": {
        "zero_optimization": "zoo.zero.config:ZeroConfig",
    },
}
"""kind → name → ``"module:attribute"``."""
