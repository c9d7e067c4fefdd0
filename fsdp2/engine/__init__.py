"""The engine: shards, gathers and reduces. It is what a plain step runs."""

from .events import Change as Change
from .events import Extensions as Extensions
from .events import Observer as Observer
from .events import extend as extend
from .state import root_of as root_of
