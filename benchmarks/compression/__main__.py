"""``python -m benchmarks.compression``: packed layers, the topic's first page; see README.md for the others."""

from benchmarks.compression.packed_linear import main

raise SystemExit(main())
