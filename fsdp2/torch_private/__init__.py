"""The private names of torch that fsdp2 uses, each with the reason why no public name will do. Nothing else has one.

`lookup.py` finds them. Names that training needs are `required`: this package, which every other part of fsdp2 imports
first, raises one error that lists all that torch lacks. Without any other name one ability is refused, or off.

`internals.py` has the names of a step, `rare_internals.py` those that the engine and its rooms use seldom: by these two
the engine enters. The other files are named after the folder that they serve. Nothing here imports anything else of
fsdp2.
"""

from . import dtensor as dtensor
from . import internals as internals
from . import rare_internals as rare_internals
from .lookup import refuse_incomplete

refuse_incomplete()
