from .page import page_of as page_of
from .page import write_report as write_report
from .run import Run as Run
from .run import read_run as read_run
