"""The document of ``initialize``, and the classes, keys and constants under which programs read it."""
