"""The engine: shards, gathers and reduces. It is what always runs."""

from .events import Observer as Observer
from .events import extend as extend
