"""Programs that follow what errors and warnings of the package advise; see registry.py."""

from advised import accumulate_programs as accumulate_programs
from advised import check_programs as check_programs
from advised import checkpoint_programs as checkpoint_programs
from advised import core_programs as core_programs
from advised import entry_programs as entry_programs
from advised import file_programs as file_programs
from advised import input_programs as input_programs
from advised import library_programs as library_programs
from advised import plan_programs as plan_programs
from advised import refusal_programs as refusal_programs
from advised import row_programs as row_programs
from advised import simulate_programs as simulate_programs
from advised import skip_programs as skip_programs
from advised import tensor_programs as tensor_programs
from advised import tool_programs as tool_programs
from advised import topology_programs as topology_programs
from advised.registry import ELSEWHERE as ELSEWHERE
from advised.registry import ENTRIES as ENTRIES
