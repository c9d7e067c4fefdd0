"""Programs that follow what errors and warnings of the package advise; see registry.py."""

from advised import core_programs as core_programs
from advised import tensor_programs as tensor_programs
from advised.registry import ELSEWHERE as ELSEWHERE
from advised.registry import ENTRIES as ENTRIES
