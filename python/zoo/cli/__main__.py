"""``python -m zoo.cli``."""

from zoo.cli.app import main

main()
