"""Small complete training tasks, usable by name in a config and short enough to copy."""
