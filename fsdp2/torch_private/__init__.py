"""The private names of torch that fsdp2 uses, each with the reason why no public name will do. Nothing else has one.

`lookup.py` finds them. Names that training needs are `required`: this package, which every other part of fsdp2 imports
first, raises one error that lists all that torch lacks. Without any other name one ability is refused, or off.

`compat.py` has the names of a step, `beyond_step.py` those that the engine and its rooms use seldom: by these two the
engine enters. The other files are named after the folder that they serve. Nothing here imports anything else of fsdp2.
"""

from . import beyond_step as beyond_step
from . import compat as compat
from . import dtensor as dtensor
from .lookup import refuse_incomplete

refuse_incomplete()
