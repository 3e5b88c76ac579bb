"""``import deepspeed`` gives ``zoo.deepspeed``, which takes the place of this module."""

__zoo_standin__ = True

from zoo.deepspeed import install_as_deepspeed

install_as_deepspeed()
