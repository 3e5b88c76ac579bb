from .check import (
    CollectiveMismatchError as CollectiveMismatchError,
)
from .check import (
    no_collectives as no_collectives,
)
from .communicator import (
    Communicator as Communicator,
)
from .exchange import exchange as exchange
from .failures import (
    RankFailedError as RankFailedError,
)
from .failures import (
    agree_none_failed as agree_none_failed,
)
from .failures import (
    raise_in_next as raise_in_next,
)
from .failures import (
    raise_together as raise_together,
)
from .failures import (
    report_uncaught as report_uncaught,
)
from .failures import (
    together as together,
)
from .handles import (
    DONE as DONE,
)
from .handles import (
    Handle as Handle,
)
from .handles import (
    Then as Then,
)
from .handles import (
    advance as advance,
)
from .handles import (
    all_of as all_of,
)
from .launch import (
    init_distributed as init_distributed,
)
from .launch import (
    local_device as local_device,
)
from .launch import (
    speak_as_torchrun as speak_as_torchrun,
)
from .log import (
    CommsLog as CommsLog,
)
from .log import (
    OpStats as OpStats,
)
from .messages import (
    Recv as Recv,
)
from .messages import (
    Send as Send,
)
from .objects import gather_object as gather_object
from .recovery import Recovery as Recovery
from .teardown import before_teardown as before_teardown
