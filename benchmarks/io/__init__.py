"""zoo.io beside fio, DeepSpeed's aio_handle, plain Python and torch.save: bytes a second, CPU time, and the GIL."""
