"""Passes over graphs, one a file. ``zoo.compile.contract`` has their names and what each promises."""
