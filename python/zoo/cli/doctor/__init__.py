"""What this machine and its software offer to zoo, and the command that adds what is missing.

:func:`~zoo.cli.doctor.examining.examine` asks; a :class:`~zoo.cli.doctor.report.Report` prints itself and goes to JSON.
torch is asked in a process of its own (``torch_side.py``), so that one that is missing, broken or hangs is a line of
the report and not its end.
"""
