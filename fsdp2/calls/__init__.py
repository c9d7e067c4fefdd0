"""How users' code calls sharded modules: inputs and outputs of any structure, modes, transforms, other methods.

The engine enters by `inputs.py` and `nested.py` from the hooks around a forward, by `user_code.py` from the hooks that
autograd calls, and by `transforms.py` from the class of sharded modules. Errors ask `callers.py` who has called.
"""
