"""What a message of zoo means, and what a key of a configuration does: ``zoo explain``, ``zoo config explain KEY``."""
