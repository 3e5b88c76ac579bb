"""Optimizers that send what they compute: 1-bit Adam and LAMB, 0/1 Adam, and their like."""
