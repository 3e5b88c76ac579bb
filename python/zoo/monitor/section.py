"""What the configuration sections of all sinks have in common."""

from __future__ import annotations

from pathlib import PurePath
from typing import ClassVar, Literal

from pydantic import field_validator

from zoo.config import Section

__all__ = ["FolderSection", "MonitorSection"]


class MonitorSection(Section):
    """The section of a sink. One of another package may be any section; with this as its base it has ``ranks``."""

    carried_by: ClassVar[str] = ""

    enabled: bool = False
    """Whether anything is written."""

    ranks: Literal["first", "all"] = "first"
    """Which ranks write: rank 0, or each of them into a place of its own."""


class FolderSection(MonitorSection):
    """The section of a sink that writes files into ``<output_path>/<job_name>``."""

    output_path: str = ""
    """Folder for the files of all jobs; empty: where the script was started."""

    job_name: str = "DeepSpeedJobName"
    """Name of this job, and of its folder inside ``output_path``."""

    @field_validator("output_path")
    @classmethod
    def _local(cls, value: str) -> str:
        if "://" in value or "\0" in value:
            raise ValueError(
                f"output_path = {value!r}; give a folder of this machine's file system, mounted if need be"
            )
        return value

    @field_validator("job_name")
    @classmethod
    def _inside(cls, value: str) -> str:
        path = PurePath(value)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in value:
            raise ValueError(f"job_name = {value!r}; give the name of a folder inside output_path, such as 'run1'")
        return value
