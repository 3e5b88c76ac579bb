from .injecting import Injection as Injection
from .injecting import detach as detach
from .injecting import inject as inject
