"""``deepspeed.compression``, and what ``deepspeed.runtime.data_pipeline`` has of curricula and random-LTD."""
