"""Pipelines: a training step beside the serial model's and peers', measured timelines beside simulated ones."""
