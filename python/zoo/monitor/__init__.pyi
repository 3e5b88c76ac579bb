from .events import events as events
from .feed import Feed as Feed
from .section import (
    FolderSection as FolderSection,
)
from .section import (
    MonitorSection as MonitorSection,
)
