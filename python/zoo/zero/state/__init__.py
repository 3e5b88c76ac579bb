"""Training state as logical tensors: saved, loaded, read, edited."""
