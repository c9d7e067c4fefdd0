"""The engine: shards, gathers and reduces. It is what always runs."""

from .build import fully_shard as fully_shard
from .build import replicate as replicate
from .events import Observer as Observer
from .events import Strategies as Strategies
from .events import extend as extend
from .events import strategies as strategies
from .module import FSDPModule as FSDPModule
from .module import UnshardHandle as UnshardHandle
from .policy import CPUOffloadPolicy as CPUOffloadPolicy
from .policy import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policy import OffloadPolicy as OffloadPolicy
