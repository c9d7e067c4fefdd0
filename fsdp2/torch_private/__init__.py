"""The private names of torch that fsdp2 uses, each with the reason why no public name will do. Nothing else has one.

It imports nothing else of fsdp2. `compat.py` has what training needs, `beyond_step.py` what else the engine uses; the
other files are named after the folder that they serve.
"""
