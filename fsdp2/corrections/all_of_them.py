"""What torch does wrong with sharded parameters, and with other DTensors, put right for the whole process."""

from __future__ import annotations

from .. import torch_compat
from ..bridge.pipelining import register_full_in_pipelines
from ..once import once
from .addresses import refuse_addresses
from .autograd_inputs import accept_sharded_inputs
from .copies import copy_gradients
from .data_attribute import follow_data
from .ddp_around import refuse_ddp_around
from .draws import draw_like_plain_tensors
from .dtensor_operations import compute_like_plain_tensors
from .full_tensor import average_in_full_tensor
from .initialisers import initialise_like_plain_tensors
from .mixed_norms import refuse_mixed_norms
from .mixed_operands import explain_mixed_operands
from .optimizer_states import cut_loaded_states
from .optimizer_steps import follow_optimizer_steps
from .parallelize_after import refuse_parallelize_after
from .parts import write_through_parts
from .plain_operands import meet_plain_numbers
from .reparametrize_after import refuse_reparametrization_after


@once
def correct_torch() -> None:
    """From now on. What each changes is said there, and in the README."""
    torch_compat.keep_out_of_graphs()
    follow_optimizer_steps()
    cut_loaded_states()
    average_in_full_tensor()
    meet_plain_numbers()
    follow_data()
    copy_gradients()
    accept_sharded_inputs()
    write_through_parts()
    compute_like_plain_tensors()
    draw_like_plain_tensors()
    initialise_like_plain_tensors()
    refuse_ddp_around()
    refuse_parallelize_after()
    refuse_reparametrization_after()
    refuse_mixed_norms()
    refuse_addresses()
    register_full_in_pipelines()
    explain_mixed_operands()  # behind all that handle operations
