"""``deepspeed.comm``, and process groups by name (``deepspeed.utils.groups``)."""
