"""How users' code calls sharded modules: inputs and outputs of any structure, modes, transforms, other methods.

The engine enters by `inputs.py` and `nested.py` from the hooks around a forward; by `user_code.py` where it calls a
user's code, or is called by it; and by `forward_method.py`, `transforms.py` and `user_classes.py` where it makes the
class of sharded modules. Refusals enter by `callers.py` (who has called) and `compiled_backward.py`.
"""
