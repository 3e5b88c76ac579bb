from .align import (
    AlignedSplit as AlignedSplit,
)
from .align import (
    split_aligned as split_aligned,
)
from .checksum import crc32c as crc32c
from .checksum import native_version as native_version
from .config import AioConfig as AioConfig
from .errors import (
    CancelledError as CancelledError,
)
from .errors import (
    ChecksumError as ChecksumError,
)
from .errors import (
    PoolExhaustedError as PoolExhaustedError,
)
from .errors import (
    TransferError as TransferError,
)
from .errors import (
    UnavailableError as UnavailableError,
)
from .errors import (
    UnexpectedEndError as UnexpectedEndError,
)
from .files import (
    File as File,
)
from .files import (
    Striped as Striped,
)
from .future import (
    Future as Future,
)
from .future import (
    Transfer as Transfer,
)
from .gds import Registration as Registration
from .handle import (
    Handle as Handle,
)
from .handle import (
    HandleStats as HandleStats,
)
from .ledger import (
    Ledger as Ledger,
)
from .ledger import (
    LedgerStats as LedgerStats,
)
from .memory import memory_of as memory_of
from .mock import (
    Fault as Fault,
)
from .mock import (
    Mock as Mock,
)
from .pool import (
    BufferPool as BufferPool,
)
from .pool import (
    PoolStats as PoolStats,
)
