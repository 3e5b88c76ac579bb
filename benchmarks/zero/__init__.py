"""zoo.zero beside its peers: host time, step time, memory, and model states against the formula."""
