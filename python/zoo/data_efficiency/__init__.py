"""Which samples a step sees, how long they are, which layers run and which tokens they see: engine parts.

* ``curriculum.CurriculumLearning``: sequences that grow.
* ``schedules``: how difficulties grow.
"""
