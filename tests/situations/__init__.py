"""Defines the situations in which sharded training silently goes wrong, each a program that a user may write.

A program runs on a plain model and whole batches, which is the oracle, and on ranks that shard the model, where it must
end as its line says: EXACT, or LOUD with a message that contains the given text. Called with one of its `ways`, it does
what the sentences of the message that it names (`advises`) say, and must be EXACT. See outcomes.py; a docstring is the
situation's name in the printed table.
"""

from situations import between_ranks as between_ranks
from situations import calls as calls
from situations import inputs as inputs
from situations import parameters as parameters
from situations import steps as steps
from situations import weights as weights
from situations.common import SITUATIONS as SITUATIONS
