from dataclasses import dataclass


@dataclass(frozen=True)
class Subpackage:
    name: str
    version: str
    summary: str
